"""Convolutions of any number of dimensions, with stride, padding, dilation, groups, transposed.

Each point of the output (of the input, when transposed) meets the whole filter of its group once:
2 x batch x points x elements of the weight, whose shape already is that of one group. Padding is
counted as if it were data, as torch's own counter does.
"""

from __future__ import annotations

import math
from functools import partial

import msgspec

from stepscope.explain.flops.call import Call, Dims, Unknown
from stepscope.explain.flops.cost import Cost, matmul_like
from stepscope.explain.flops.matmul import moved_by


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """Where an operator's arguments are; None where it has no such argument."""

    stride: int
    padding: int
    dilation: int | None = None
    output_padding: int | None = None
    groups: int | None = None
    transposed: int | bool = False
    bias: int | None = 2


_PLACES = {
    ("aten::convolution", "aten::_convolution", "aten::convolution_overrideable"): Places(
        stride=3, padding=4, dilation=5, transposed=6, output_padding=7, groups=8
    ),
    (
        *(f"aten::conv{dims}d" for dims in (1, 2, 3)),
        *(f"aten::{library}_convolution_relu" for library in ("cudnn", "miopen")),
    ): Places(stride=3, padding=4, dilation=5, groups=6),
    tuple(f"aten::conv_transpose{dims}d" for dims in (1, 2, 3)): Places(
        stride=3, padding=4, output_padding=5, groups=6, dilation=7, transposed=True
    ),
    ("aten::cudnn_convolution",): Places(padding=2, stride=3, dilation=4, groups=5, bias=None),
    ("aten::cudnn_convolution_transpose",): Places(
        padding=2, output_padding=3, stride=4, dilation=5, groups=6, transposed=True, bias=None
    ),
    ("aten::cudnn_convolution_add_relu", "aten::miopen_convolution_add_relu"): Places(
        bias=4, stride=5, padding=6, dilation=7, groups=8
    ),
    (
        *(f"aten::{library}_convolution" for library in ("miopen", "mkldnn", "_mps")),
        *("aten::miopen_depthwise_convolution", "mkldnn::_convolution_pointwise"),
    ): Places(padding=3, stride=4, dilation=5, groups=6),
    ("aten::miopen_convolution_transpose",): Places(
        padding=3, output_padding=4, stride=5, dilation=6, groups=7, transposed=True
    ),
    ("aten::_nnpack_spatial_convolution",): Places(padding=3, stride=4),
    tuple(
        f"aten::{name}"
        for name in ("_slow_conv2d_forward", "thnn_conv2d", "slow_conv3d", "slow_conv3d_forward")
    ): Places(bias=3, stride=4, padding=5),
    (
        *("aten::_conv_depthwise2d", "aten::conv_depthwise3d"),
        *("aten::slow_conv_dilated2d", "aten::slow_conv_dilated3d"),
    ): Places(bias=3, stride=4, padding=5, dilation=6),
    ("aten::slow_conv_transpose2d", "aten::slow_conv_transpose3d"): Places(
        bias=3, stride=4, padding=5, output_padding=6, dilation=7, transposed=True
    ),
}

_FORWARD = {name: places for names, places in _PLACES.items() for name in names}


class BackwardPlaces(msgspec.Struct, frozen=True, kw_only=True):
    """The mask of the gradients that are asked for comes after the groups."""

    stride: int
    transposed: int
    groups: int


_BACKWARD = {
    "aten::convolution_backward": BackwardPlaces(stride=4, transposed=7, groups=9),
    "aten::convolution_backward_overrideable": BackwardPlaces(stride=3, transposed=6, groups=8),
}


class ConvolutionShape(msgspec.Struct, frozen=True, kw_only=True):
    """One convolution, forward or backward. The weight's shape is that of one group."""

    given: Dims
    weight: Dims
    out: Dims
    stride: Dims
    transposed: bool

    @property
    def filtered_points(self) -> int:
        """Of a sample: those that meet the whole filter."""
        return math.prod((self.given if self.transposed else self.out)[2:])

    @property
    def flops(self) -> int:
        """Of the forward pass, and of each gradient."""
        return 2 * self.given[0] * self.filtered_points * math.prod(self.weight)


def read_convolution(call: Call) -> ConvolutionShape:
    """Raises Unknown for other operators and where the trace does not say enough."""
    if call.name in _BACKWARD:
        return _read_backward(call, _BACKWARD[call.name])
    if call.name not in _FORWARD:
        raise Unknown
    places = _FORWARD[call.name]
    given, weight = call.tensor(0).dims, call.tensor(1).dims
    if len(given) == len(weight) - 1:  # without a batch
        given = (1, *given)
    transposed = places.transposed
    if not isinstance(transposed, bool):
        transposed = call.flag(transposed)
    return ConvolutionShape(
        given=given,
        weight=weight,
        out=_output(call, places, given, weight, transposed=transposed),
        stride=tuple(call.numbers(places.stride)),
        transposed=transposed,
    )


def asked_gradients(call: Call) -> list[bool]:
    """Of a backward call: whether it computes the gradients of input, weight and bias."""
    return call.flags(_BACKWARD[call.name].groups + 1)


def _read_backward(call: Call, places: BackwardPlaces) -> ConvolutionShape:
    return ConvolutionShape(
        given=call.tensor(1).dims,
        weight=call.tensor(2).dims,
        out=call.tensor(0).dims,
        stride=tuple(call.numbers(places.stride)) if call.has_value(places.stride) else (),
        transposed=call.flag(places.transposed),
    )


def _forward(call: Call, places: Places) -> Cost:
    shape = read_convolution(call)
    given, weight = call.tensor(0), call.tensor(1)
    has_bias = places.bias is not None and call.has_tensor(places.bias)
    read = [given, weight] + ([call.tensor(places.bias)] if has_bias and places.bias else [])
    return Cost(flops=shape.flops, moved=moved_by(read, math.prod(shape.out)))


def _output(call: Call, places: Places, given: Dims, weight: Dims, *, transposed: bool) -> Dims:
    space = len(weight) - 2

    def per_dimension(place: int | None, default: int) -> list[int]:
        values = [default] if place is None else call.numbers(place)
        return values * space if len(values) == 1 else values

    stride, dilation = per_dimension(places.stride, 1), per_dimension(places.dilation, 1)
    batch, kind = given[0], call.text(places.padding)
    if kind == "same":
        return (batch, weight[0], *given[2:])
    padding = [0] * space if kind == "valid" else per_dimension(places.padding, 0)
    sizes = list(zip(given[2:], weight[2:], stride, padding, dilation, strict=True))
    if transposed:
        more = per_dimension(places.output_padding, 0)
        groups = 1 if places.groups is None else call.number(places.groups)
        points = [
            (size - 1) * step - 2 * pad + wide * (k - 1) + extra + 1
            for (size, k, step, pad, wide), extra in zip(sizes, more, strict=True)
        ]
        return (batch, weight[1] * groups, *points)
    points = [
        (size + 2 * pad - wide * (k - 1) - 1) // step + 1 for size, k, step, pad, wide in sizes
    ]
    return (batch, weight[0], *points)


for _names, _places in _PLACES.items():
    matmul_like(*_names)(partial(_forward, places=_places))


@matmul_like("aten::conv_tbc")
def time_batch_channels(call: Call) -> Cost:
    """Input [time, batch, channels], weight [width, channels in, channels out]."""
    given, weight = call.tensor(0), call.tensor(1)
    time = given.dims[0] + 2 * call.number(3) - weight.dims[0] + 1
    points = time * given.dims[1]
    moved = moved_by((given, weight), points * weight.dims[2])
    return Cost(flops=2 * points * weight.elements, moved=moved)


@matmul_like(*_BACKWARD)
def backward(call: Call) -> Cost:
    """Gradients of input and weight cost as much as the forward pass each."""
    gradient, given, weight = call.tensor(0), call.tensor(1), call.tensor(2)
    mask = asked_gradients(call)
    written = sum(
        tensor.elements for tensor, asked in zip((given, weight), mask, strict=False) if asked
    )
    once = read_convolution(call).flops
    return Cost(flops=once * sum(mask[:2]), moved=moved_by((gradient, given, weight), written))
