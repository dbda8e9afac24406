"""Kernels of a graph's replay, joined to the operators of its recording by their order.

Products are the anchors: where a replay has as many of them as its recording, they are the same,
one by one. Between two products, kernels and operators of one kind are joined in order where there
are as many of both, or as many stretches of both. What is not sure stays unknown.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from stepscope.explain.flops.memory_bound import VIEWS
from stepscope.records.trace import ABSENT

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

_MEMSET = "memset"
_COPY = "copy"
_ROUNDS = 4
# Kind: operators, and kernels that they launch; the first match counts.
_KINDS = tuple(
    (kind, re.compile(operators), re.compile(kernels))
    for kind, operators, kernels in (
        ("fused update", r"_fused_(?:adam|adamw|sgd|adagrad)", r"multi_tensor_apply.*fused"),
        ("list addcmul", r"_foreach_addcmul", r"multi_tensor_apply.*pointwiseop.*multiplies"),
        ("list addcdiv", r"_foreach_addcdiv", r"multi_tensor_apply.*pointwiseop.*divides"),
        ("list lerp", r"_foreach_lerp", r"multi_tensor_apply.*lerp"),
        ("list add", r"_foreach_add", r"multi_tensor_apply.*plus<"),
        ("list sub", r"_foreach_sub", r"multi_tensor_apply.*minus<"),
        ("list mul", r"_foreach_mul", r"multi_tensor_apply.*multiplies"),
        ("list div", r"_foreach_div", r"multi_tensor_apply.*divides"),
        ("list pow", r"_foreach_pow", r"multi_tensor_apply.*power"),
        ("list neg", r"_foreach_neg", r"multi_tensor_apply.*negate"),
        ("list reciprocal", r"_foreach_reciprocal", r"multi_tensor_apply.*reciprocal"),
        ("list sqrt", r"_foreach_sqrt", r"multi_tensor_apply.*sqrt"),
        ("list norm", r"_foreach_norm", r"lpnorm|multi_tensor_apply.*norm"),
        ("list copy", r"_foreach_copy", r"multi_tensor_apply.*copy"),
        ("list", r"_foreach_", r"multi_tensor_apply"),
        ("layer norm backward", r"layer_norm_backward", r"layer_norm_grad|gammabeta|layernormback"),
        ("layer norm", r"layer_norm", r"layer_?norm|rowwisemoments"),
        ("batch norm", r"batch_norm", r"batch_?norm|::bn_[fb]w|cudnn.*bn_"),
        ("group norm", r"group_norm", r"group_?norm|computefusedparams|internalgradients"),
        ("rms norm", r"rms_norm", r"rms_?norm"),
        ("softmax backward", r"softmax_backward", r"softmax\w*back"),
        ("softmax", r"softmax", r"softmax"),
        ("gelu backward", r"gelu_backward", r"gelubackward"),
        ("gelu", r"gelu", r"gelu"),
        ("silu backward", r"silu_backward", r"silu_backward|silubackward"),
        ("silu", r"silu", r"silu"),
        ("tanh backward", r"tanh_backward", r"tanh_backward|tanhbackward"),
        ("sigmoid backward", r"sigmoid_backward", r"sigmoid_backward|sigmoidbackward"),
        ("relu backward", r"threshold_backward", r"threshold"),
        ("relu", r"relu_?$|clamp", r"clamp|relu"),
        ("dropout backward", r"dropout_backward", r"masked_scale"),
        ("dropout", r"dropout", r"dropout"),
        ("loss", r"nll_loss", r"nll_loss"),
        ("pool", r"pool", r"pool"),
        ("upsample", r"upsample", r"upsample"),
        (
            "embedding backward",
            r"embedding_(?:dense_)?backward",
            r"embedding_back|grad_weight",
        ),
        (
            "lookup",
            r"embedding$|index_select|gather$|index$",
            r"gather_kernel|indexselect|index_elementwise|index_kernel|index_get",
        ),
        ("cat", r"cat$|stack$", r"catarray"),
        (_COPY, r"copy_?$|clone$|contiguous$", r"copy_kernel|copy_device|memcpy"),
        ("fill", r"zero|fill_?$|full|ones", r"fillfunctor"),
        ("mean", r"mean$", r"meanops"),
        ("sum", r"sum$", r"sum_functor"),
        ("addcmul", r"::addcmul", r"addcmul"),
        ("addcdiv", r"::addcdiv", r"addcdiv"),
        ("lerp", r"::lerp", r"lerp"),
        ("negate", r"::neg_?$", r"neg_kernel"),
        ("reciprocal", r"::reciprocal_?$", r"reciprocal"),
        ("add", r"::(?:add|sub|rsub)_?$", r"functor(?:onself)?_add|add_?functor"),
        ("multiply", r"::(?:mul|div)_?$", r"mul_?functor|div_?functor|div_true"),
        ("power", r"::pow_?$", r"pow_"),
        ("tanh", r"::tanh_?$", r"tanh"),
        ("sigmoid", r"::sigmoid_?$", r"sigmoid"),
        ("exp", r"::exp_?$", r"exp_kernel"),
        ("log", r"::log_?$", r"log_kernel"),
        ("sqrt", r"::sqrt_?$", r"(?<!r)sqrt"),
        ("rsqrt", r"::rsqrt_?$", r"rsqrt"),
        ("where", r"::where$", r"where"),
        ("masked fill", r"masked_fill", r"masked_fill"),
        ("arange", r"arange", r"arange"),
        ("triangle", r"::tri[lu]_?$", r"triu_tril|tri[lu]"),
    )
)
# Lists whose tensors cannot share a kernel are computed one by one.
_ONE_BY_ONE = {
    "multiply": ("list div", "list mul"),
    "add": ("list add", "list sub"),
    "power": ("list pow",),
    "copy": ("list copy",),
    "sqrt": ("list sqrt",),
}
# Operators with kernels of several kinds; those of a product, without the product itself.
_SEVERAL = {
    "aten::nll_loss_backward": ("fill", "loss"),
    "aten::nll_loss2d_backward": ("fill", "loss"),
    "aten::select_backward": ("fill", "copy"),
    "aten::slice_backward": ("fill", "copy"),
    "aten::embedding_dense_backward": ("fill", "embedding backward"),
    "aten::_scaled_dot_product_efficient_attention_backward": ("multiply", "sum"),
    "aten::_efficient_attention_backward": ("multiply", "sum"),
}
# Kernels that prepare a product, and kernels that finish one.
_PREPARES = re.compile(r"dot_do_o|nchwtonhwc|computeoffsets|im2col|convert_?tensor|tensortransform")
_FINISHES = re.compile(r"splitk_?reduce|convert_dq|postprocess|reduce_1block|reduce_wgrad|col2im")


@lru_cache(maxsize=4096)
def operator_kinds(name: str) -> tuple[str, ...]:
    """Operators without an entry are a kind of their own."""
    if name in _SEVERAL:
        return _SEVERAL[name]
    return (next((kind for kind, pattern, _ in _KINDS if pattern.search(name)), name),)


@lru_cache(maxsize=4096)
def kernel_kind(name: str) -> str | None:
    lower = name.lower()
    if lower.startswith(_MEMSET):
        return _MEMSET
    return next((kind for kind, _, pattern in _KINDS if pattern.search(lower)), None)


def join_by_order(
    operators: Sequence[str],
    is_product: Sequence[int],
    kernels: Sequence[str],
    multiplies: Sequence[bool],
) -> list[int]:
    """For each kernel of a replay the place of its operator in the recording, or -1.

    `is_product` says how many kernels of an operator multiply, `multiplies` which kernels do.
    """
    anchors = [place for place, count in enumerate(is_product) for _ in range(count)]
    products = [place for place, product in enumerate(multiplies) if product]
    found = [ABSENT] * len(kernels)
    if len(anchors) != len(products):
        return found
    for event, place in zip(products, anchors, strict=True):
        found[event] = place
    works = [
        name not in VIEWS and not count for name, count in zip(operators, is_product, strict=True)
    ]
    for _ in range(_ROUNDS):  # what was joined bounds what was not
        before = found.count(ABSENT)
        _join_round(found, works, operators, kernels)
        if found.count(ABSENT) == before:
            break
    _give_helpers(found, kernels)
    return found


def _join_round(
    found: list[int], works: Sequence[bool], operators: Sequence[str], kernels: Sequence[str]
) -> None:
    """Between kernels that are known already; operators run in the order of their recording."""
    known = [(event, place) for event, place in enumerate(found) if place >= 0]
    edges = [(ABSENT, ABSENT), *known, (len(kernels), len(operators))]
    used = set(found)
    for (event, place), (next_event, next_place) in pairwise(edges):
        events = range(event + 1, next_event)
        if events:
            inside = range(place + 1, next_place)
            between = [one for one in inside if works[one] and one not in used]
            if next_place < len(operators) and operators[next_place] in _SEVERAL:
                between.append(next_place)  # some of its kernels come before the one that is known
            _join_between(found, events, between, operators, kernels)
            if not between and next_place < len(operators) and works[next_place]:
                for one in events:  # an operator first copies what is not contiguous
                    if kernel_kind(kernels[one]) == _COPY:
                        found[one] = next_place


def _join_between(
    found: list[int],
    events: range,
    places: Sequence[int],
    operators: Sequence[str],
    kernels: Sequence[str],
) -> None:
    """Kind by kind: one by one where there are as many of both, else by stretches."""
    kinds = [(place, kind) for place in places for kind in operator_kinds(operators[place])]
    by_kind = _grouped(*zip(*kinds, strict=True)) if kinds else {}
    for kind, mine in _grouped(events, [kernel_kind(kernels[one]) for one in events]).items():
        others = (by_kind.get(other, []) for other in _ONE_BY_ONE.get(str(kind), ()))
        candidates = by_kind.get(kind) or next((some for some in others if some), [])
        if len(candidates) == 1 or len(candidates) == len(mine):
            _spread(found, mine, candidates)
            continue
        order = {place: number for number, place in enumerate(places)}
        runs = _stretches(mine, mine)
        groups = _stretches(candidates, [order[place] for place in candidates])
        if len(runs) == len(groups):
            for run, group in zip(runs, groups, strict=True):
                _spread(found, run, group)


def _spread(found: list[int], events: Sequence[int], places: Sequence[int]) -> None:
    """Each operator gets as many kernels; nothing where they cannot be divided so."""
    each, rest = divmod(len(events), len(places))
    if not rest:
        for number, event in enumerate(events):
            found[event] = places[number // each]


def _stretches(items: Sequence[int], numbers: Sequence[int]) -> list[list[int]]:
    """Items whose numbers follow each other without a gap."""
    keyed = [
        (number - at, item) for at, (number, item) in enumerate(zip(numbers, items, strict=True))
    ]
    return [[item for _, item in run] for _, run in groupby(keyed, key=lambda one: one[0])]


def _grouped(items: Sequence[int], keys: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for item, key in zip(items, keys, strict=True):
        groups.setdefault(key, []).append(item)
    return groups


def _give_helpers(found: list[int], kernels: Sequence[str]) -> None:
    """An operator clears its workspace right before its kernel, and its other kernels lie between
    those that are known to be its own."""
    for event in range(1, len(found)):
        if found[event] < 0 and _FINISHES.search(kernels[event].lower()):
            found[event] = found[event - 1]
    for event in range(len(found) - 2, ABSENT, -1):
        if found[event] < 0 and _prepares(kernels[event]):
            found[event] = found[event + 1]
    known = [event for event, place in enumerate(found) if place >= 0]
    for event, after in pairwise(known):
        if found[event] == found[after]:
            found[event + 1 : after] = [found[event]] * (after - event - 1)


def _prepares(kernel: str) -> bool:
    return kernel_kind(kernel) == _MEMSET or bool(_PREPARES.search(kernel.lower()))
