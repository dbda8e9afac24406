"""Fused attention: scores q k^T and their product with v, forward; five such products, backward.

Nothing is taken off for a causal mask (half of the scores are never needed): the convention of MFU
figures and of torch's own counter. Of the five products of a backward pass one computes the scores
again, which a model without fused attention would have kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.flops.call import Call, Tensor, Unknown
from stepscope.explain.flops.cost import Cost, matmul_like
from stepscope.explain.flops.matmul import moved_by, unknown

if TYPE_CHECKING:
    from collections.abc import Callable

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


def _forward(heads_at: int, sequence_at: int) -> Callable[[Call], Cost]:
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


matmul_like(*_HEADS_FIRST, *_HEADS_FIRST_WITHOUT_BACKWARD)(_forward(1, 2))
matmul_like(*map(_backward_name, _HEADS_FIRST))(_backward(1, 2))
matmul_like(*_SEQUENCE_FIRST, "FlashAttnFunc")(_forward(2, 1))
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
