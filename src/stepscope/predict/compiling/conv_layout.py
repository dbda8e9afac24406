"""Convolutions in compiled code: Inductor keeps their tensors in channels-last order.

The rule is that of `decide_layout_opt` in torch/_inductor/graph.py (torch 2.13): not for grouped
convolutions, except depthwise ones, not with a convolution that halves its channels, not if all
have few of them, and not for a graph with 300 nodes per convolution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.flops.call import Unknown
from stepscope.records.lazy_pattern import lazy_pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.flops.call import Call, Dims

_CONVOLUTION = lazy_pattern(r"conv")
_FEW = 64  # channels
_MOST_NODES = 300  # per convolution
_NODES_PER_KERNEL = 3  # of a graph: views and conversions launch nothing
_CONVERSION = lazy_pattern(r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|convertTensor_kernel")
_OWN_DEPTHWISE = lazy_pattern(r"conv_depthwise[23]d_")


def keeps_channels_last(calls: Sequence[Call]) -> bool:
    """Whether the compiler would change the layout of a model whose forward makes these calls."""
    weights = [shapes for call in calls if (shapes := _shapes(call)) is not None]
    if _NODES_PER_KERNEL * len(calls) >= _MOST_NODES * len(weights):
        return False
    if any(_is_grouped(given, weight) or _halves(weight) for given, weight in weights):
        return False
    return not all(max(weight[:2]) <= _FEW for _, weight in weights)


def is_conversion(kernel: str) -> bool:
    """A kernel that only changes a tensor's layout around a convolution."""
    return _CONVERSION.search(kernel) is not None


def is_own_depthwise(kernel: str) -> bool:
    """PyTorch's own kernel; with channels last, cuDNN's is used."""
    return _OWN_DEPTHWISE.search(kernel) is not None


def _shapes(call: Call) -> tuple[Dims, Dims] | None:
    """Of a convolution's input and weight, if both are over a plane."""
    if not _CONVOLUTION.search(call.name) or "backward" in call.name:
        return None
    try:
        given, weight = call.tensor(0).dims, call.tensor(1).dims
    except Unknown:
        return None
    return (given, weight) if len(weight) == 4 == len(given) else None


def _is_grouped(given: Dims, weight: Dims) -> bool:
    """A depthwise convolution has one channel per group."""
    return given[1] > weight[1] > 1


def _halves(weight: Dims) -> bool:
    return 2 * weight[0] <= weight[1] and weight[2] > 1
