"""Depthwise convolutions in a narrow dtype: they move more than they multiply.

PyTorch's own kernels take as long as in fp32. In channels_last cuDNN has kernels for depthwise
convolutions, which move half the bytes. In fp32 it has none for some gradients of weights, and
takes a kernel for any convolution, which is far slower; a narrow dtype has them all.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.predict.by_text import by_text, is_channels_last, tensor_shapes
from stepscope.predict.kernels import FLOOR_NS, Family
from stepscope.records.lazy_pattern import lazy_pattern

if TYPE_CHECKING:
    import re

    from stepscope.explain.replay.graph import Flags, Floats, StepGraph
    from stepscope.predict.step_context import StepContext
    from stepscope.records.efficiency import Ceilings

_MOST_CHANNELS = 4  # that a depthwise convolution reads per output
_OWN = lazy_pattern(r"c1_k1_nhwc")
_GENERAL = lazy_pattern(r"grouped_direct|implicit_gemm")
_OWN_SHARE = 0.06  # of fp32's peak, by cuDNN's own kernels in bf16 (ConvNeXt on an H200)
# Where the kernel of the narrow dtype is not known: it may be this much shorter, or take as long.
_GAIN = 4.0


def find_depthwise(context: StepContext) -> Flags:
    """Convolutions over one or few channels at a time."""
    operators, shapes = context.operators, context.trace.host.shapes
    rows = np.where(operators.family == Family.CONVOLUTION, operators.row, -1)
    return by_text(context.trace, shapes, rows, _has_few_channels, False)


def narrow_depthwise(
    context: StepContext, graph: StepGraph, depthwise: Flags, ceilings: Ceilings
) -> tuple[StepGraph, Flags]:
    """The step in a narrow dtype, and the depthwise tasks whose gain is not known."""
    strides = context.trace.host.strides
    rows = np.where(depthwise, context.operators.row, -1)
    channels_last = by_text(context.trace, strides, rows, is_channels_last, False)
    own, general = (
        channels_last & _kernels_named(context, pattern) for pattern in (_OWN, _GENERAL)
    )
    dur_ns = graph.tasks.dur_ns
    start = np.minimum(dur_ns, FLOOR_NS)
    new_ns = np.where(own, start + 0.5 * (dur_ns - start), dur_ns)
    peak = ceilings.flops.get("fp32", 0.0)
    # A backward operator has the FLOPs of two gradients; a kernel computes one.
    gradients = np.where(context.named(lambda name: "backward" in name), 2.0, 1.0)
    flops = np.maximum(context.operators.flops, 0.0) / gradients
    general &= (flops > 0) & (peak > 0)
    own_ns = FLOOR_NS + 1e9 * flops / max(1.0, _OWN_SHARE * peak)
    new_ns = np.where(general, np.minimum(dur_ns, own_ns), new_ns)
    return replace(graph, tasks=replace(graph.tasks, dur_ns=new_ns)), depthwise & ~own


def find_depthwise_doubt(dur_ns: Floats, depthwise: Flags) -> float:
    """Of the logarithm of the step: as if one deviation away they gained half of what they may."""
    share = float(dur_ns[depthwise].sum()) / max(1.0, float(dur_ns.sum()))
    return -0.5 * math.log(1.0 - share * (1.0 - 1.0 / _GAIN))


def _kernels_named(context: StepContext, pattern: re.Pattern[str]) -> Flags:
    trace, rows = context.trace, context.graph.tasks.row
    return by_text(
        trace, trace.device.name, rows, lambda name: pattern.search(name) is not None, False
    )


def _has_few_channels(shapes: str) -> bool:
    """By input and weight, the first arguments of a convolution; its backward has a gradient before
    them."""
    tensors = [shape for shape in tensor_shapes(shapes) if len(shape) >= 3]
    if len(tensors) < 2:
        return False
    given, weight = tensors[-2:]
    return 0 < weight[1] <= _MOST_CHANNELS and given[1] > weight[1]
