"""Convolutions that sum over the samples.

Where a loss has gradients in it (a penalty on their length), backward differentiates backward. The
gradient of a weight then comes from a plain convolution of two results, with samples and channels
exchanged: its filter is as large as an image, its inner dimension grows with the batch, and its
result is as small as the weight: a few blocks, each with a long way to go.

Which kernels cuDNN has for such shapes in another dtype was not measured. They take at least as
long as one block, and at most as long as now: the middle of both counts, the interval has both.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.replay.graph import Phase
from stepscope.explain.replay.schedule import step_ns
from stepscope.predict.by_text import by_text, tensor_shapes
from stepscope.predict.convolutions import find_convolution_ns, one_block_ns
from stepscope.predict.kernels import Family
from stepscope.predict.side_streams import retime

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags, Floats
    from stepscope.predict.step_context import StepContext
    from stepscope.records.efficiency import Ceilings

_LEAST_RANK = 3  # of a filter


def find_sample_convolutions(context: StepContext) -> Flags:
    """Tasks of backward that convolve with something that is no parameter. Gradients that torch
    computes by an operator of its own, and layers that run again, are no such tasks."""
    operators, trace = context.operators, context.trace
    if context.parameters is None:
        return np.zeros(len(operators.row), np.bool_)
    known = {_without_ones(shape) for shape in context.parameters.shapes}
    plain = (
        (context.task_phase == Phase.BACKWARD)
        & (operators.family == Family.CONVOLUTION)
        & ~operators.recomputed
        & ~context.named(lambda name: "backward" in name)
    )

    def filters_with_results(shapes: str) -> bool:
        tensors = tensor_shapes(shapes)
        is_filter = len(tensors) > 1 and len(tensors[1]) >= _LEAST_RANK
        return is_filter and _without_ones(tensors[1]) not in known

    rows = np.where(plain, operators.row, -1)
    found: Flags = by_text(trace, trace.host.shapes, rows, filters_with_results, False)
    return found


def find_halfway_ns(
    context: StepContext, dtype: str, ceilings: Ceilings, by_shape_ns: Floats
) -> Floats:
    """Of each task: the geometric mean of what its whole operator takes now and of the least that
    it may take in a dtype."""
    tasks, operators = context.graph.tasks, context.operators
    now_ns = tasks.dur_ns / np.maximum(operators.share, 1e-9)
    block_ns = find_convolution_ns(context, dtype, ceilings, one_block_ns)
    least_ns = np.minimum(np.maximum(by_shape_ns, block_ns), now_ns)
    halfway: Floats = np.sqrt(now_ns * least_ns)
    return halfway


def find_halfway_doubt(context: StepContext, dur_ns: Floats, halfway: Flags) -> float:
    """Of the logarithm of the step: two deviations reach to the step in which these tasks take as
    long as now."""
    if not halfway.any():
        return 0.0
    now_ns = np.where(halfway, context.graph.tasks.dur_ns, dur_ns)
    slow, fast = (
        step_ns(retime(context.graph, each, context.operators.row)) for each in (now_ns, dur_ns)
    )
    return max(0.0, math.log(slow / fast)) / 2.0 if fast else 0.0


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A filter over time has one more dimension of size one when cuDNN gets it."""
    return tuple(size for size in shape if size != 1)
