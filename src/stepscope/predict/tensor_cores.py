"""Price convolutions in tf32 and in 16 bits, and find matmuls whose rows tensor cores cannot
read aligned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from stepscope.explain.flops.call import Call, Unknown
from stepscope.explain.flops.products import asked_gradients, read_convolution
from stepscope.predict.fitted import fitted, table
from stepscope.predict.kernel_costs import (
    ALIGNED_BYTES,
    FLOOR_NS,
    Family,
    after_start,
    retime_tasks,
    sheet_flops,
    with_durations,
)
from stepscope.records.dtypes import PEAK_BYTES
from stepscope.step.call_tree import by_text, distinct_places, is_channels_last, tensor_shapes
from stepscope.step.graph import Phase, StepGraph
from stepscope.step.replay import step_ns
from stepscope.text.words import lazy_pattern

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext
    from stepscope.records.hardware import Ceilings
    from stepscope.step.graph import Flags, Floats, Ints

# How long a dense convolution takes on a GPU, in tf32 and in 16 bits, by its shape.
#
# cuDNN multiplies matrices: rows are the points that the filter meets, columns the output channels,
# and the inner dimension is input channels x taps. Blocks of the result are filled up to whole
# ones. Tensors in torch's usual layout are copied to channels_last and back, except by a 1x1 filter
# whose rows are aligned. A time is a sum of amounts, each a time at the data sheet's rates, times
# fitted factors.

_COLUMNS = 128  # of a block; also its rows
_CHANNEL_BYTES = 64  # of input channels that a block reads at a time
_WEIGHT_CHANNELS = 64  # of a block of a weight's gradient
_FEW_CHANNELS, _FEW_BYTES = 8, 32  # an image's channels are filled up to so many bytes there
_ALIGNED = 16  # bytes
_RANKS = (3, 4, 5)  # tensors of a convolution over one to three dimensions
# One deviation of the logarithm of a net's convolutions together. Single ones have a long tail:
# cuDNN takes other kernels for some shapes, and a tenth of all take half as long again, or longer.
_DEVIATION = fitted("doubts.convolutions")


class Convolution(msgspec.Struct, frozen=True, kw_only=True):
    batch: int
    inputs: int  # channels
    outputs: int
    read_points: int  # of a sample of the input
    written_points: int  # of a sample of the output
    filtered_points: int  # of a sample: those that meet the whole filter
    taps: int  # of the filter
    strided: bool = False
    channels_last: bool = False

    @property
    def flops(self) -> float:
        """Of the forward pass, and of each gradient."""
        points = self.batch * self.filtered_points
        return 2.0 * points * self.inputs * self.outputs * self.taps


class AskedGradients(NamedTuple):
    """Those that a backward call computes."""

    of_input: bool = True
    of_weight: bool = True


class Terms(NamedTuple):
    """What a convolution's time is the sum of: amounts in ns, or the factors of those amounts."""

    start: float  # 1 ns: the factor is the time
    layout_start: float  # 1 ns where layouts change
    product: float  # of filled-up blocks at peak: forward, or the gradient of the input
    weight_product: float  # the gradient of the weight
    wave: float  # one block on every multiprocessor at peak
    moved: float  # input and output once at full bandwidth, as all below
    weights: float  # parts of the weight's gradient are added up
    input_layout: float  # the input, where its layout changes
    output_layout: float
    strided: float  # the larger tensor, where points are left out or put in


# Of the forward and the backward pass, by dtype.
_FACTORS = {
    dtype: [Terms(**terms) for terms in passes]
    for dtype, passes in table("kernels.convolutions", dict[str, list[dict[str, float]]]).items()
}
_FACTORS["fp16"] = _FACTORS["bf16"]


def convolution_ns(
    shape: Convolution,
    dtype: str,
    ceilings: Ceilings,
    multiprocessors: int,
    gradients: AskedGradients | None = None,
) -> float:
    """The forward pass, or the backward pass if gradients are given."""
    factors = _FACTORS[dtype][gradients is not None]
    found = amounts(shape, dtype, ceilings, multiprocessors, gradients)
    return sum(factor * amount for factor, amount in zip(factors, found, strict=True))


def amounts(
    shape: Convolution,
    dtype: str,
    ceilings: Ceilings,
    multiprocessors: int,
    gradients: AskedGradients | None = None,
) -> Terms:
    item, peak_ns = PEAK_BYTES[dtype], 1e9 / sheet_flops(ceilings, dtype)
    byte_ns = item * 1e9 / ceilings.bytes_s if ceilings.bytes_s else 0.0
    points, chunk = shape.batch * shape.filtered_points, _CHANNEL_BYTES // item
    columns, inner = shape.outputs, shape.inputs
    passes = product = 1.0  # backward has two passes, each with half of its amounts
    weight_product = 0.0
    if gradients is not None:
        columns, inner = inner, columns
        passes, product = sum(gradients) / 2, float(gradients.of_input)
        block = _FEW_BYTES // item if shape.inputs <= _FEW_CHANNELS else _WEIGHT_CHANNELS
        filled = _fill(shape.outputs, _COLUMNS) * _fill(shape.inputs, block)
        weight_product = gradients.of_weight * 2.0 * points * filled * shape.taps * peak_ns
    filled = _fill(columns, _COLUMNS) * _fill(inner, chunk)
    wave_flops = 2.0 * multiprocessors * _COLUMNS**2 * inner * shape.taps
    read_ns = shape.batch * shape.inputs * shape.read_points * byte_ns
    written_ns = shape.batch * shape.outputs * shape.written_points * byte_ns
    larger_ns = read_ns if shape.read_points >= shape.written_points else written_ns
    # A 1x1 filter is a plain product if the rows of both matrices start at aligned addresses.
    is_plain = shape.taps == 1 and not shape.strided
    is_plain &= shape.filtered_points * item % _ALIGNED == 0
    is_one_point = shape.read_points == shape.written_points == 1
    layout = passes * (not (shape.channels_last or is_one_point or is_plain))
    return Terms(
        start=passes,
        layout_start=layout,
        product=product * 2.0 * points * filled * shape.taps * peak_ns,
        weight_product=weight_product,
        wave=product * wave_flops * peak_ns,
        moved=passes * (read_ns + written_ns),
        weights=bool(weight_product) * shape.inputs * shape.outputs * shape.taps * byte_ns,
        input_layout=layout * read_ns,
        output_layout=layout * written_ns,
        strided=product * shape.strided * larger_ns,
    )


def _fill(size: int, block: int) -> int:
    return -(-size // block) * block


def dense_convolution(call: Call, *, channels_last: bool = False) -> Convolution | None:
    """None for other operators, grouped convolutions, which were not measured, and where the trace
    does not say enough. The constants were fitted to one dimension and two."""
    try:
        shape = read_convolution(call)
    except Unknown:
        return None
    if (
        not len(shape.given) == len(shape.weight) == len(shape.out)
        or len(shape.given) not in _RANKS
    ):
        return None
    inputs, outputs = shape.weight[:2] if shape.transposed else shape.weight[1::-1]
    if (shape.given[1], shape.out[1]) != (inputs, outputs):
        return None
    return Convolution(
        batch=shape.given[0],
        inputs=inputs,
        outputs=outputs,
        read_points=math.prod(shape.given[2:]),
        written_points=math.prod(shape.out[2:]),
        filtered_points=shape.filtered_points,
        taps=math.prod(shape.weight[2:]),
        strided=any(step > 1 for step in shape.stride),
        channels_last=channels_last,
    )


def find_convolution_ns(
    context: StepContext,
    dtype: str,
    ceilings: Ceilings,
    time_of: Callable[..., float] = convolution_ns,
) -> Floats:
    """Of each task: the time of its whole operator in a dtype, 0 if that is not known."""
    operators, costs, trace = context.operators, context.costs, context.trace
    if dtype not in _FACTORS or not len(trace.host):
        return np.zeros(len(operators.row))
    counted = (operators.family == Family.CONVOLUTION) & (operators.flops > 0)
    row = np.where(counted, operators.row, -1)
    signature = np.where(row >= 0, costs.signature[np.maximum(row, 0)], -1)
    last = by_text(trace, trace.host.strides, row, is_channels_last, False)
    codes, place = distinct_places(np.where(signature >= 0, 2 * signature + last, -1))

    def ns_per_flop(code: int) -> float:
        call = context.costs.calls[code // 2]
        shape = dense_convolution(call, channels_last=bool(code % 2))
        if shape is None or not shape.flops:
            return 0.0
        if "backward" not in call.name:
            return time_of(shape, dtype, ceilings, context.multiprocessors) / shape.flops
        gradients = AskedGradients(*asked_gradients(call)[:2])
        if not any(gradients):
            return 0.0
        whole = time_of(shape, dtype, ceilings, context.multiprocessors, gradients)
        return whole / (shape.flops * sum(gradients))

    rates = [ns_per_flop(code) if code >= 0 else 0.0 for code in codes.tolist()]
    # A kernel of a captured graph has its own part of the FLOPs.
    total: Floats = np.array(rates, np.float64)[place] * operators.flops
    return total


def one_block_ns(
    shape: Convolution,
    dtype: str,
    ceilings: Ceilings,
    multiprocessors: int,
    gradients: AskedGradients | None = None,
) -> float:
    """One block goes through its inner dimension on one multiprocessor at peak: no convolution
    whose inner dimension is not divided among blocks takes less."""
    return amounts(shape, dtype, ceilings, multiprocessors, gradients).wave


def find_convolution_doubt(dur_ns: Floats, modelled: Flags) -> float:
    """Of the logarithm of the step, by the share of its convolutions."""
    return _DEVIATION * float(dur_ns[modelled].sum()) / max(1.0, float(dur_ns.sum()))


# Convolutions that sum over the samples.
#
# Where a loss has gradients in it (a penalty on their length), backward differentiates backward.
# The gradient of a weight then comes from a plain convolution of two results, with samples and
# channels exchanged: its filter is as large as an image, its inner dimension grows with the batch,
# and its result is as small as the weight: a few blocks, each with a long way to go.
#
# Which kernels cuDNN has for such shapes in another dtype was not measured. They take at least as
# long as one block, and at most as long as now: the middle of both counts, the interval has both.

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
        step_ns(retime_tasks(context.graph, each, context.operators.row))
        for each in (now_ns, dur_ns)
    )
    return max(0.0, math.log(slow / fast)) / 2.0 if fast else 0.0


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A filter over time has one more dimension of size one when cuDNN gets it."""
    return tuple(size for size in shape if size != 1)


# Depthwise convolutions in a narrow dtype: they move more than they multiply.
#
# PyTorch's own kernels take as long as in fp32. In channels_last cuDNN has kernels for depthwise
# convolutions, which move half the bytes. In fp32 it has none for some gradients of weights, and
# takes a kernel for any convolution, which is far slower; a narrow dtype has them all.

_MOST_CHANNELS = 4  # that a depthwise convolution reads per output
_OWN = lazy_pattern(r"c1_k1_nhwc")
_GENERAL = lazy_pattern(r"grouped_direct|implicit_gemm")
_OWN_SHARE = fitted("kernels.depthwise_share")  # of fp32's peak, by cuDNN's own kernels
# Where the kernel of the narrow dtype is not known: it may be this much shorter, or take as long.
_GAIN = fitted("doubts.depthwise_gain")


def find_depthwise(context: StepContext) -> Flags:
    """Convolutions over one or few channels at a time."""
    operators, shapes = context.operators, context.trace.host.shapes
    rows = np.where(operators.family == Family.CONVOLUTION, operators.row, -1)

    def has_few_channels(text: str) -> bool:
        """Read input and weight: the first arguments, in backward after the gradient."""
        tensors = [shape for shape in tensor_shapes(text) if len(shape) >= 3]
        if len(tensors) < 2:
            return False
        given, weight = tensors[-2:]
        return 0 < weight[1] <= _MOST_CHANNELS and given[1] > weight[1]

    return by_text(context.trace, shapes, rows, has_few_channels, False)


def narrow_depthwise(
    context: StepContext, graph: StepGraph, depthwise: Flags, ceilings: Ceilings
) -> tuple[StepGraph, Flags]:
    """The step in a narrow dtype, and the depthwise tasks whose gain is not known."""
    strides = context.trace.host.strides
    rows = np.where(depthwise, context.operators.row, -1)
    channels_last = by_text(context.trace, strides, rows, is_channels_last, False)
    own, general = (
        channels_last & context.kernels_named(pattern.search) for pattern in (_OWN, _GENERAL)
    )
    dur_ns = graph.tasks.dur_ns
    new_ns = np.where(own, after_start(dur_ns, 0.5), dur_ns)
    peak = ceilings.flops.get("fp32", 0.0)
    # A backward operator has the FLOPs of two gradients; a kernel computes one.
    gradients = np.where(context.named(lambda name: "backward" in name), 2.0, 1.0)
    flops = np.maximum(context.operators.flops, 0.0) / gradients
    general &= (flops > 0) & (peak > 0)
    own_ns = FLOOR_NS + 1e9 * flops / max(1.0, _OWN_SHARE * peak)
    new_ns = np.where(general, np.minimum(dur_ns, own_ns), new_ns)
    return with_durations(graph, new_ns), depthwise & ~own


def find_depthwise_doubt(dur_ns: Floats, depthwise: Flags) -> float:
    """Of the logarithm of the step: as if one deviation away they gained half of what they may."""
    share = float(dur_ns[depthwise].sum()) / max(1.0, float(dur_ns.sum()))
    return -0.5 * math.log(1.0 - share * (1.0 - 1.0 / _GAIN))


# How the rows of a product's matrices lie in memory.
#
# Tensor cores are fed 16 bytes at a time. A vocabulary of 50,257 makes rows of 100,514 bytes: every
# second one starts at an odd multiple of two, and a library falls back to kernels that read two
# bytes at a time.


def find_alignment(context: StepContext, item_bytes: int) -> Ints:
    """Bytes that every row of each product starts at a multiple of, at most 16; 16 for what is no
    matrix product."""
    operators, host = context.operators, context.trace.host
    rows = np.where(operators.family == Family.MATMUL, operators.row, -1)
    read = by_text(context.trace, host.strides, rows, read_row_length, 0.0)
    written = by_text(context.trace, host.shapes, rows, written_row_length, 0.0)
    common = np.gcd(read.astype(np.int64), written.astype(np.int64)) * item_bytes
    alignment: Ints = np.gcd(common, ALIGNED_BYTES).astype(np.int32)
    return alignment


def read_row_length(strides: str) -> float:
    """The largest common divisor of the operands' rows in elements; 0 if nothing is known."""
    rows = [steps[-2:] for steps in tensor_shapes(strides) if len(steps) >= 2]
    return float(math.gcd(*(max(pair) for pair in rows if min(pair) == 1)))


def written_row_length(shapes: str) -> float:
    """The last operand's columns are the result's."""
    matrices = [dims for dims in tensor_shapes(shapes) if len(dims) >= 2]
    return float(matrices[-1][-1]) if matrices else 0.0
