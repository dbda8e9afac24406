"""Operators that multiply: matrix products, fused attention, convolutions, recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from stepscope.explain.flops.call import (
    UNKNOWN,
    Call,
    Cost,
    Dims,
    Formula,
    Tensor,
    Unknown,
    matmul_like,
    total_bytes,
)

# Matrix products: m x k times k x n costs 2mkn.


def moved_by(read: Sequence[Tensor], written: int, item_bytes: int | None = None) -> int:
    """Bytes of the tensors read and of the `written` elements; unknown for unknown dtypes."""
    try:
        return total_bytes(read) + written * (item_bytes or read[0].item_bytes)
    except KeyError:
        return UNKNOWN


def _product(a: Dims, b: Dims) -> tuple[int, int]:
    """FLOPs and output elements of torch.matmul, batch dimensions broadcast."""
    rows = a[-2] if len(a) > 1 else 1
    columns = b[-1] if len(b) > 1 else 1
    inner = a[-1]
    if inner != (b[-2] if len(b) > 1 else b[-1]):
        raise Unknown
    out = math.prod(broadcast(a[:-2], b[:-2])) * rows * columns
    return 2 * out * inner, out


def broadcast(*shapes: Dims) -> Dims:
    """The common shape, as torch broadcasts."""
    if len(set(shapes)) == 1:
        return shapes[0]
    length = max(map(len, shapes), default=0)
    padded = [(1,) * (length - len(shape)) + shape for shape in shapes]
    out = tuple(max(sizes) if min(sizes) else 0 for sizes in zip(*padded, strict=True))
    fits = (size in (1, most) for dims in padded for size, most in zip(dims, out, strict=True))
    if not all(fits):
        raise Unknown
    return out


def _of(a: Tensor, b: Tensor, *others: Tensor) -> Cost:
    flops, out = _product(a.dims, b.dims)
    return Cost(flops=flops, moved=moved_by((a, b, *others), out))


@matmul_like(
    "aten::mm", "aten::bmm", "aten::matmul", "aten::mv", "aten::dot", "aten::vdot", "aten::inner"
)
def product(call: Call) -> Cost:
    return _of(call.tensor(0), call.tensor(1))


@matmul_like("aten::addmm", "aten::addmm_", "aten::_addmm_activation", "aten::baddbmm")
@matmul_like("aten::baddbmm_", "aten::addmv", "aten::addmv_", "aten::addbmm", "aten::addbmm_")
def added_product(call: Call) -> Cost:
    """What is added, a, b."""
    return _of(call.tensor(1), call.tensor(2), call.tensor(0))


@matmul_like("aten::ger", "aten::outer")
def outer(call: Call) -> Cost:
    a, b = call.tensor(0), call.tensor(1)
    out = a.elements * b.elements
    return Cost(flops=2 * out, moved=moved_by((a, b), out))


@matmul_like("aten::linear", "aten::mkldnn_linear", "mkldnn::_linear_pointwise")
@matmul_like("aten::_weight_int8pack_mm")
def linear(call: Call) -> Cost:
    """Input [..., k], weight [n, k], perhaps a bias."""
    given, weight = call.tensor(0), call.tensor(1)
    if not given.dims or given.dims[-1] != weight.dims[-1]:
        raise Unknown
    wide = weight.dims[0] if len(weight.dims) > 1 else 1
    out = math.prod(given.dims[:-1]) * wide
    bias = [call.tensor(2)] if call.has_tensor(2) else []
    return Cost(flops=2 * out * given.dims[-1], moved=moved_by((given, weight, *bias), out))


@matmul_like("aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_int_mm")
def scaled_product(call: Call) -> Cost:
    """Low precision in, usually 16 or 32 bits out."""
    a, b = call.tensor(0), call.tensor(1)
    flops, out = _product(a.dims, b.dims)
    return Cost(flops=flops, moved=moved_by((a, b), out, 4 if call.name.endswith("int_mm") else 2))


@matmul_like("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2")
def grouped_product(call: Call) -> Cost:
    """Groups lie along rows, columns or the inner dimension; together they fill it."""
    a, b = call.tensor(0), call.tensor(1)
    if len(a.dims) == len(b.dims) == 3:
        return _of(a, b)
    rows, inner, columns = a.dims[-2], a.dims[-1], b.dims[-1]
    if inner != b.dims[-2]:
        raise Unknown
    both_flat = len(a.dims) == len(b.dims) == 2
    groups = _groups(call) if both_flat else 1  # then each group has an output of its own
    moved = moved_by((a, b), groups * rows * columns, 2) if groups else UNKNOWN
    return Cost(flops=2 * rows * inner * columns, moved=moved)


def _groups(call: Call) -> int:
    """One group per offset."""
    place = 2 if call.name == "aten::_grouped_mm" else 4
    return call.tensor(place).elements if call.has_tensor(place) else 0


@matmul_like("aten::_weight_int4pack_mm", "aten::_weight_int4pack_mm_for_cpu")
def packed_int4(call: Call) -> Cost:
    """x [m, k]; scales and zeros [k / group, n, 2] tell n whatever the packing."""
    given, packed, scales = call.tensor(0), call.tensor(1), call.tensor(3)
    out = given.dims[0] * scales.dims[1]
    return Cost(flops=2 * out * given.dims[1], moved=moved_by((given, packed, scales), out))


@matmul_like("aten::_sparse_mm", "aten::_sparse_addmm", "aten::_sparse_semi_structured_linear")
@matmul_like("aten::_sparse_semi_structured_mm", "aten::_sparse_semi_structured_addmm")
@matmul_like("aten::_cslt_sparse_mm", "aten::sparse_sampled_addmm", "aten::_trilinear")
def unknown(_: Call) -> Cost:
    """The amount of work depends on values that no trace has."""
    raise Unknown


@matmul_like("_Linear", "_LayerNormLinear", "_LayerNormMLP")
def transformer_engine(call: Call) -> Cost:
    """Weights are matrices with rows as long as the input's."""
    given = next((tensor for tensor in call.tensors() if len(tensor.dims) > 2), None)
    matrices = [tensor for tensor in call.tensors() if len(tensor.dims) == 2]
    if given is None and call.name == "_Linear" and len(matrices) == 2:
        matrices, given = matrices[:1], matrices[1]
    if given is None or not matrices or matrices[0].dims[-1] != given.dims[-1]:
        raise Unknown
    rows = math.prod(given.dims[:-1])
    return Cost(flops=2 * rows * sum(tensor.elements for tensor in matrices))


# Fused attention: scores q k^T and their product with v, forward; five such products, backward.
#
# Nothing is taken off for a causal mask (half of the scores are never needed): the convention of
# MFU figures and of torch's own counter. Of the five products of a backward pass one computes the
# scores again, which a model without fused attention would have kept.

# First in the shape after the batch: heads (as torch calls it) or the sequence (as kernels do).
_KINDS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_HEADS_FIRST = (
    *(f"aten::_scaled_dot_product_{kind}" for kind in (*_KINDS, "fused_attention_overrideable")),
    "aten::_cudnn_attention_forward",
)
_HEADS_FIRST_WITHOUT_BACKWARD = (
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_attention_math",
    "aten::_scaled_dot_product_attention_math_for_mps",
)
_LIBRARIES_SEQUENCE_FIRST = (
    "flash_attn::_flash_attn_forward flash_attn_3::_flash_attn_forward flash_attn_3::fwd "
    "aiter::_flash_attn_forward aiter::mha_fwd aiter::fmha_v3_fwd aiter::wrapper_fmha_v3_fwd "
    "xformers_flash::flash_fwd xformers_flash3::flash_fwd "
    "xformers::efficient_attention_forward_cutlass xformers::efficient_attention_forward_ck"
)
_SEQUENCE_FIRST = (
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    *_LIBRARIES_SEQUENCE_FIRST.split(),
)
# Sequences of different lengths in one row: the lengths are values, which no trace has.
_PACKED = (
    "flash_attn::_flash_attn_varlen_forward",
    "flash_attn::_flash_attn_varlen_backward",
    "aiter::mha_varlen_fwd",
    "aiter::mha_varlen_bwd",
    "FlashAttnVarlenFunc",
    "FusedAttnFunc",
)
# Place of the causal flag, where the operator has one.
CAUSAL = {
    "aten::scaled_dot_product_attention": 5,
    "aten::_scaled_dot_product_flash_attention": 4,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 4,
    "aten::_scaled_dot_product_efficient_attention": 6,
    "aten::_scaled_dot_product_cudnn_attention": 6,
    "aten::_flash_attention_forward": 8,
    "aten::_cudnn_attention_forward": 10,
    "aten::_efficient_attention_forward": 9,
}


def _products(q: Tensor, k: Tensor, v: Tensor, heads_at: int, sequence_at: int) -> tuple[int, int]:
    """FLOPs of one product with q or k, and of one with v. k and v may have fewer heads than q."""
    if not len(q.dims) == len(k.dims) == len(v.dims) == 4:
        raise Unknown
    if q.dims[3] != k.dims[3] or k.dims[sequence_at] != v.dims[sequence_at]:
        raise Unknown
    if q.dims[0] != k.dims[0] or q.dims[heads_at] % (k.dims[heads_at] or 1):
        raise Unknown
    pairs = q.dims[0] * q.dims[heads_at] * q.dims[sequence_at] * k.dims[sequence_at]
    return 2 * pairs * q.dims[3], 2 * pairs * v.dims[3]


def _attention_forward(heads_at: int, sequence_at: int) -> Callable[[Call], Cost]:
    def formula(call: Call) -> Cost:
        q, k, v = (call.tensor(place) for place in range(3))
        _refuse_packed(call)
        flops = sum(_products(q, k, v, heads_at, sequence_at))
        out = q.elements // (q.dims[3] or 1) * v.dims[3]
        return Cost(flops=flops, moved=moved_by((q, k, v), out))

    return formula


def _backward(heads_at: int, sequence_at: int) -> Callable[[Call], Cost]:
    def formula(call: Call) -> Cost:
        gradient, q, k, v = (call.tensor(place) for place in range(4))
        _refuse_packed(call)
        scores, values = _products(q, k, v, heads_at, sequence_at)
        written = q.elements + k.elements + v.elements
        # The forward's output is read as well, and is as large as its gradient.
        return Cost(
            flops=3 * scores + 2 * values,
            again=scores,
            moved=moved_by((gradient, gradient, q, k, v), written),
        )

    return formula


_LENGTHS = {
    "aten::_flash_attention_forward": 3,
    "aten::_efficient_attention_forward": 4,
    "aten::_flash_attention_backward": 6,
    "aten::_efficient_attention_backward": 6,
}


def _refuse_packed(call: Call) -> None:
    place = _LENGTHS.get(call.name)
    if place is not None and call.has_tensor(place):
        raise Unknown


def _backward_name(name: str) -> str:
    if "forward" in name or "fwd" in name:
        return name.replace("forward", "backward").replace("fwd", "bwd")
    return f"{name}_backward"


matmul_like(*_HEADS_FIRST, *_HEADS_FIRST_WITHOUT_BACKWARD)(_attention_forward(1, 2))
matmul_like(*map(_backward_name, _HEADS_FIRST))(_backward(1, 2))
matmul_like(*_SEQUENCE_FIRST, "FlashAttnFunc")(_attention_forward(2, 1))
matmul_like(*map(_backward_name, _SEQUENCE_FIRST))(_backward(2, 1))
matmul_like(*_PACKED)(unknown)


@matmul_like("FlashAttnQKVPackedFunc")
def packed_in_one(call: Call) -> Cost:
    """q, k and v in one tensor [batch, sequence, 3, heads, deep]."""
    whole = call.tensor(0)
    batch, length, three, heads, deep = whole.dims
    if three != 3:
        raise Unknown
    one = Tensor((batch, length, heads, deep), whole.dtype)
    return Cost(flops=sum(_products(one, one, one, 2, 1)), moved=moved_by([one] * 3, one.elements))


# Convolutions of any number of dimensions, with stride, padding, dilation, groups, transposed.
#
# Each point of the output (of the input, when transposed) meets the whole filter of its group once:
# 2 x batch x points x elements of the weight, whose shape already is that of one group. Padding is
# counted as if it were data, as torch's own counter does.


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


def _convolution_forward(call: Call, places: Places) -> Cost:
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
    matmul_like(*_names)(partial(_convolution_forward, places=_places))


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


# Recurrent layers that a library runs as one operator.
#
# Every row of the input (time x batch) meets every weight matrix once. Layers that PyTorch runs
# step by step are made of matrix products, which count as such.

_GATES = {0: 1, 1: 1, 2: 4, 3: 3}  # relu, tanh, lstm, gru, as cuDNN and MIOpen number them


def _rows(given: Tensor) -> int:
    """Time x batch, packed or not."""
    return math.prod(given.dims[:-1])


def _weights(call: Call, given: Tensor, mode_at: int, *, projects: bool) -> int:
    """Elements of all weight matrices: from their shapes, else by mode, width and depth."""
    shapes = call.tensor_list(1)
    if shapes and any(len(dims) == 2 for dims in shapes):
        return sum(math.prod(dims) for dims in shapes if len(dims) == 2)
    mode, hidden = call.number(mode_at), call.number(mode_at + 1)
    shift = 1 if projects else 0
    projected = call.number(mode_at + 2) if projects else 0
    layers, both = call.number(mode_at + 2 + shift), call.flag(mode_at + 6 + shift)
    if mode not in _GATES:
        raise Unknown
    sides, out = 1 + both, projected or hidden
    wide = [given.dims[-1], *([sides * out] * (layers - 1))]
    one_side = sum(_GATES[mode] * hidden * (width + out) for width in wide)
    return sides * (one_side + layers * projected * hidden)


def _whole(mode_at: int, *, projects: bool) -> Formula:
    def formula(call: Call) -> Cost:
        given = call.tensor(0)
        weights = _weights(call, given, mode_at, projects=projects)
        return Cost(flops=2 * _rows(given) * weights)

    return formula


def _whole_backward(mode_at: int, *, projects: bool) -> Formula:
    """Gradients of the states and of the weights cost a forward pass each. That of the input is
    part of the first and is left out where nobody needs it because the input is data."""
    mask_at = mode_at + 10 + projects

    def formula(call: Call) -> Cost:
        given = call.tensor(0)
        weights = _weights(call, given, mode_at, projects=projects)
        asked = call.flags(mask_at) if call.has_value(mask_at) else [True] * 4
        used = weights * (1 + asked[3])
        if not asked[0]:
            used -= _input_weights(call, given, mode_at, projects=projects)
        return Cost(flops=2 * _rows(given) * used)

    return formula


def _input_weights(call: Call, given: Tensor, mode_at: int, *, projects: bool) -> int:
    """Elements of the matrices that the input itself meets: the first layer's."""
    mode, hidden = call.number(mode_at), call.number(mode_at + 1)
    if mode not in _GATES:
        raise Unknown
    both = call.flag(mode_at + 6 + projects)
    return (1 + both) * _GATES[mode] * hidden * given.dims[-1]


matmul_like("aten::_cudnn_rnn")(_whole(6, projects=True))
matmul_like("aten::_cudnn_rnn_backward")(_whole_backward(10, projects=True))
matmul_like("aten::miopen_rnn")(_whole(5, projects=False))
matmul_like("aten::miopen_rnn_backward")(_whole_backward(10, projects=False))


@matmul_like("aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward")
def mkldnn(call: Call) -> Cost:
    """One layer in one direction: input, weight of the input, weight of the state, biases."""
    given, below, before = call.tensor(0), call.tensor(1), call.tensor(2)
    if below.dims[-1] != given.dims[-1]:
        raise Unknown
    times = 2 if call.name.endswith("_backward") else 1
    rows = _rows(given)
    return Cost(
        flops=times * 2 * rows * (below.elements + before.elements),
        moved=times * moved_by((given, below, before), rows * before.dims[-1]),
    )
