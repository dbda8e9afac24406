"""Matrix products: m x k times k x n costs 2mkn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stepscope.explain.flops.call import Call, Dims, Tensor, Unknown, total_bytes
from stepscope.explain.flops.cost import UNKNOWN, Cost, matmul_like

if TYPE_CHECKING:
    from collections.abc import Sequence


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
