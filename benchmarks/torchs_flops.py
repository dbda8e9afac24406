"""FLOPs of training steps as torch's own counter has them, for any model.

The counter does not know fused attention on a CPU, nor layers that a library runs whole (LSTM in
cuDNN or oneDNN). So attention is computed by plain products here and recurrent layers step by step,
which the counter sees. It also counts the weight's gradient of a grouped convolution once for each
group too often: that one is corrected.

`count_training` leaves fused attention as it is. It knows it on a CPU too, and with fewer heads for
keys and values than for queries, which the counter of torch 2.11 refuses.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils import flop_counter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Shape = tuple[int, ...]

_BACKWARD = torch.ops.aten.convolution_backward
_KINDS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_PRODUCTS = 5  # of backward, where queries are as deep as values; one computes the scores again


def count_flops(step: Callable[[int], Any], numbers: Iterable[int]) -> list[int]:
    """Of each of these steps."""
    return [_count_one(step, number) for number in numbers]


def count_training(step: Callable[[], Any]) -> tuple[int, int]:
    """All FLOPs of one step, and those that fused attention computes again in backward."""
    counter = flop_counter.FlopCounterMode(display=False, custom_mapping=_attention_formulas())
    with counter:
        step()
    flops = counter.get_flop_counts().get("Global", {})
    again = sum(flops.get(backward, 0) for backward in _fused_attention().values()) // _PRODUCTS
    return int(counter.get_total_flops()), again


def _fused_attention() -> dict[Any, Any]:
    """Forward operators and their backward ones, those that this torch has."""
    names = [f"_scaled_dot_product_{kind}" for kind in _KINDS]
    found = [(getattr(torch.ops.aten, name, None), f"{name}_backward") for name in names]
    return {forward: getattr(torch.ops.aten, backward) for forward, backward in found if forward}


def _attention_formulas() -> dict[Any, Callable[..., int]]:
    pairs = _fused_attention()
    forward = dict.fromkeys(pairs, _attention_forward)
    return forward | dict.fromkeys(pairs.values(), _attention_backward)


def _attention_forward(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Scores and their product with the values; every query head has its own."""
    batch, heads, length, deep = query
    return 2 * batch * heads * length * key[2] * (deep + value[3])


def _attention_backward(
    _gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any
) -> int:
    """The scores again, then two products for each of forward's."""
    batch, heads, length, deep = query
    return 2 * batch * heads * length * key[2] * (3 * deep + 2 * value[3])


def _count_one(step: Callable[[int], Any], number: int) -> int:
    counter = flop_counter.FlopCounterMode(
        display=False, custom_mapping={_BACKWARD: _convolution_backward}
    )
    counter.mod_tracker = _NoModules()
    with _only_known_operators(), counter:
        step(number)
    return int(counter.get_total_flops())


class _NoModules:
    """Instead of the counter's account by module, which fails at gradients of gradients."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@contextlib.contextmanager
def _only_known_operators() -> Iterator[None]:
    """Backward follows forward: only the forward of a recurrent layer has to be told."""
    before = (torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled)

    def begin(module: nn.Module, _: Any) -> None:
        if isinstance(module, nn.RNNBase):
            _use_libraries(cudnn=False, onednn=False)

    def end(module: nn.Module, *_: Any) -> None:
        if isinstance(module, nn.RNNBase):
            _use_libraries(cudnn=before[0], onednn=before[1])

    hooks = (
        register_module_forward_pre_hook(begin),
        register_module_forward_hook(end, always_call=True),
    )
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _use_libraries(*, cudnn: bool, onednn: bool) -> None:
    torch.backends.cudnn.enabled = cudnn
    torch.backends.mkldnn.set_flags(_enabled=onednn)


def _convolution_backward(*args: Any, **kwargs: Any) -> int:
    gradient, given, weight, *_, transposed, _, groups, mask = args
    if groups == 1:
        return int(flop_counter.flop_registry[_BACKWARD](*args, **kwargs))
    shapes = (tuple(tensor.shape) for tensor in (given, weight, gradient))
    return int(flop_counter.conv_flop_count(*shapes, transposed=transposed)) * sum(mask[:2])


_convolution_backward._get_raw = True  # type: ignore[attr-defined]  # tensors, not their shapes
