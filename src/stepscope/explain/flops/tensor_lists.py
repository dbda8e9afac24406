"""Operators on lists of tensors: foreach, fused optimizers, cat and stack.

The profiler writes the shapes of lists of up to 30 tensors, and never their dtype. lists.py fills
in the rest from what surrounds the call.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stepscope.explain.flops.call import Call, Unknown
from stepscope.explain.flops.cost import Cost, memory_bound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.flops.call import Dims

_READ_AND_WRITTEN = (
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min cos cosh div erf erfc exp "
    "expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal "
    "round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc"
)
_OPTIMIZERS = {  # lists read and lists written, without the small ones that count steps
    "aten::_fused_adam_": (4, 3),
    "aten::_fused_adamw_": (4, 3),
    "aten::_fused_adagrad_": (3, 2),
}
_AMSGRAD = 11  # place of the flag
_MOMENTUM = 4


def _cost(lists: Sequence[list[Dims] | None], passes: Sequence[int]) -> Cost:
    """`passes` of each list; elements of those recorded, counts of those that were not."""
    elements = longer = 0
    for shapes, times in zip(lists, passes, strict=True):
        if shapes is None:
            longer += times
        else:
            elements += times * sum(map(math.prod, shapes))
    return Cost(moved=0, list_elements=elements, list_passes=longer)


def _lists(call: Call, least: int = 1) -> list[list[Dims] | None]:
    lists = call.lists()
    if len(lists) < least:
        raise Unknown
    return lists


@memory_bound(*(f"aten::_foreach_{w}{end}" for w in _READ_AND_WRITTEN.split() for end in ("", "_")))
def read_and_written(call: Call) -> Cost:
    """Every list is read, and one as large as the first is written."""
    lists = _lists(call)
    return _cost(lists, [2, *([1] * (len(lists) - 1))])


@memory_bound("aten::_foreach_copy_")
def copied(call: Call) -> Cost:
    """The first list is written only."""
    lists = _lists(call, 2)
    return _cost(lists, [1] * len(lists))


@memory_bound("aten::_foreach_zero_", "aten::_foreach_norm", "aten::_foreach_max")
def touched(call: Call) -> Cost:
    """Written only, or read only with a number for each tensor."""
    return _cost(_lists(call)[:1], [1])


@memory_bound(*_OPTIMIZERS)
def optimizer(call: Call) -> Cost:
    """Parameters, gradients and state are read; all but the gradients are written."""
    read, written = _OPTIMIZERS[call.name]
    lists = _lists(call, read)[:read]
    passes = [2, 1, *([2] * (written - 1))]
    if read == 4 and call.has_value(_AMSGRAD) and call.flag(_AMSGRAD):
        return _cost([*lists, lists[0]], [*passes, 2])
    return _cost(lists, passes)


@memory_bound("aten::_fused_sgd_")
def sgd(call: Call) -> Cost:
    """As others; without momentum there is no state."""
    lists = _lists(call, 2)
    if call.text(_MOMENTUM).strip("0.") and len(lists) > 2:
        return _cost(lists[:3], [2, 1, 2])
    return _cost(lists[:2], [2, 1])


@memory_bound("aten::cat", "aten::stack", "aten::_cat", "aten::concat")
@memory_bound("aten::_amp_foreach_non_finite_check_and_unscale_")
def read_then_written(call: Call) -> Cost:
    """Every tensor once."""
    return _cost(_lists(call)[:1], [2])
