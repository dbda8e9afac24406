"""How long a dense convolution takes on a GPU, in tf32 and in 16 bits, by its shape.

cuDNN multiplies matrices: rows are the points that the filter meets, columns the output channels,
and the inner dimension is input channels x taps. Blocks of the result are filled up to whole ones.
Tensors in torch's usual layout are copied to channels_last and back, except by a 1x1 filter whose
rows are aligned. A time is a sum of amounts, each a time at the data sheet's rates, times constants
that benchmarks/fit_convolutions.py fits to times measured on an H200.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from stepscope.explain.call_tree import distinct_places
from stepscope.explain.flops.call import Unknown
from stepscope.explain.flops.convolution import asked_gradients, read_convolution
from stepscope.predict.by_text import by_text, is_channels_last
from stepscope.predict.kernels import Family, sheet_flops

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.explain.flops.call import Call
    from stepscope.explain.replay.graph import Flags, Floats
    from stepscope.predict.step_context import StepContext
    from stepscope.records.efficiency import Ceilings

_COLUMNS = 128  # of a block; also its rows
_CHANNEL_BYTES = 64  # of input channels that a block reads at a time
_WEIGHT_CHANNELS = 64  # of a block of a weight's gradient
_FEW_CHANNELS, _FEW_BYTES = 8, 32  # an image's channels are filled up to so many bytes there
_ALIGNED = 16  # bytes
_RANKS = (3, 4, 5)  # tensors of a convolution over one to three dimensions
_ITEM_BYTES = {"tf32": 4, "bf16": 2, "fp16": 2}
# One deviation of the logarithm of a net's convolutions together. Single ones have a long tail:
# cuDNN takes other kernels for some shapes, and a tenth of all take half as long again, or longer.
_DEVIATION = 0.15


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


_FORWARD, _BACKWARD = False, True
_TF32 = {
    _FORWARD: Terms(
        start=6840,
        layout_start=10700,
        product=1.4,
        weight_product=0,
        wave=0.34,
        moved=0.93,
        weights=0,
        input_layout=0,
        output_layout=2.34,
        strided=1.31,
    ),
    _BACKWARD: Terms(
        start=23700,
        layout_start=21500,
        product=1.48,
        weight_product=2.71,
        wave=0.166,
        moved=0.972,
        weights=25.2,
        input_layout=3.01,
        output_layout=4.01,
        strided=2.97,
    ),
}
_NARROW = {
    _FORWARD: Terms(
        start=8490,
        layout_start=9500,
        product=1.28,
        weight_product=0,
        wave=0.553,
        moved=0.482,
        weights=0,
        input_layout=1.47,
        output_layout=5.67,
        strided=1.41,
    ),
    _BACKWARD: Terms(
        start=25300,
        layout_start=23600,
        product=1.15,
        weight_product=1.47,
        wave=0,
        moved=1.12,
        weights=18.8,
        input_layout=6.07,
        output_layout=7.23,
        strided=2.23,
    ),
}
_FACTORS = {"tf32": _TF32, "bf16": _NARROW, "fp16": _NARROW}


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
    item, peak_ns = _ITEM_BYTES[dtype], 1e9 / sheet_flops(ceilings, dtype)
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
    layout = passes * _changes_layout(shape, item)
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


def _changes_layout(shape: Convolution, item_bytes: int) -> bool:
    """A 1x1 filter is a plain product if the rows of both matrices start at aligned addresses."""
    is_plain = shape.taps == 1 and not shape.strided
    is_aligned = shape.filtered_points * item_bytes % _ALIGNED == 0
    is_one_point = shape.read_points == shape.written_points == 1
    return not (shape.channels_last or is_one_point or (is_plain and is_aligned))


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
    rates = [
        _ns_per_flop(context, code // 2, bool(code % 2), dtype, ceilings, time_of)
        if code >= 0
        else 0.0
        for code in codes.tolist()
    ]
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


def _ns_per_flop(
    context: StepContext,
    signature: int,
    channels_last: bool,
    dtype: str,
    ceilings: Ceilings,
    time_of: Callable[..., float],
) -> float:
    call = context.costs.calls[signature]
    shape = dense_convolution(call, channels_last=channels_last)
    if shape is None or not shape.flops:
        return 0.0
    if "backward" not in call.name:
        whole = time_of(shape, dtype, ceilings, context.multiprocessors)
        return whole / shape.flops
    gradients = AskedGradients(*asked_gradients(call)[:2])
    if not any(gradients):
        return 0.0
    whole = time_of(shape, dtype, ceilings, context.multiprocessors, gradients)
    return whole / (shape.flops * sum(gradients))


def find_convolution_doubt(dur_ns: Floats, modelled: Flags) -> float:
    """Of the logarithm of the step, by the share of its convolutions."""
    return _DEVIATION * float(dur_ns[modelled].sum()) / max(1.0, float(dur_ns.sum()))
