"""Fused attention: scores q k^T and their product with v, forward; five such products, backward.

Nothing is taken off for a causal mask (half of the scores are never needed): the convention of MFU
figures and of torch's own counter. Of the five products of a backward pass one computes the scores
again, which a model without fused attention would have kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepscope.explain.flops.call import Call, Tensor, Unknown, total_bytes
from stepscope.explain.flops.cost import UNKNOWN, Cost, matmul_like

if TYPE_CHECKING:
    from collections.abc import Callable

# First in the shape after the batch: heads (as torch calls it) or the sequence (as kernels do).
_HEADS_FIRST = (
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_scaled_dot_product_attention_math",
    "aten::_scaled_dot_product_attention_math_for_mps",
    "aten::_cudnn_attention_forward",
)
_HEADS_FIRST_BACKWARD = (
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention_backward",
    "aten::_scaled_dot_product_fused_attention_overrideable_backward",
    "aten::_cudnn_attention_backward",
)
_SEQUENCE_FIRST = (
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "flash_attn::_flash_attn_forward",
    "flash_attn_3::_flash_attn_forward",
    "flash_attn_3::fwd",
    "aiter::_flash_attn_forward",
    "aiter::mha_fwd",
    "aiter::fmha_v3_fwd",
    "aiter::wrapper_fmha_v3_fwd",
    "xformers_flash::flash_fwd",
    "xformers_flash3::flash_fwd",
    "xformers::efficient_attention_forward_cutlass",
    "xformers::efficient_attention_forward_ck",
    "FlashAttnFunc",
)
_SEQUENCE_FIRST_BACKWARD = (
    "aten::_flash_attention_backward",
    "aten::_efficient_attention_backward",
    "flash_attn::_flash_attn_backward",
    "flash_attn_3::_flash_attn_backward",
    "flash_attn_3::bwd",
    "aiter::_flash_attn_backward",
    "aiter::mha_bwd",
    "aiter::fmha_v3_bwd",
    "aiter::wrapper_fmha_v3_bwd",
    "xformers_flash::flash_bwd",
    "xformers_flash3::flash_bwd",
    "xformers::efficient_attention_backward_cutlass",
    "xformers::efficient_attention_backward_ck",
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


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Of one attention."""

    batch: int
    heads: int  # of q; k and v may have fewer
    queries: int
    keys: int
    deep: int  # of q and k
    deep_v: int

    @property
    def scores(self) -> int:
        """FLOPs of one product with q or k."""
        return 2 * self.batch * self.heads * self.queries * self.keys * self.deep

    @property
    def values(self) -> int:
        """FLOPs of one product with v."""
        return 2 * self.batch * self.heads * self.queries * self.keys * self.deep_v


def _sizes(q: Tensor, k: Tensor, v: Tensor, heads_at: int, sequence_at: int) -> Sizes:
    if not len(q.dims) == len(k.dims) == len(v.dims) == 4:
        raise Unknown
    if q.dims[3] != k.dims[3] or k.dims[sequence_at] != v.dims[sequence_at]:
        raise Unknown
    if q.dims[0] != k.dims[0] or q.dims[heads_at] % (k.dims[heads_at] or 1):
        raise Unknown
    return Sizes(
        batch=q.dims[0],
        heads=q.dims[heads_at],
        queries=q.dims[sequence_at],
        keys=k.dims[sequence_at],
        deep=q.dims[3],
        deep_v=v.dims[3],
    )


def _moved(read: list[Tensor], written: int) -> int:
    try:
        return total_bytes(read) + written * read[0].item_bytes
    except KeyError:
        return UNKNOWN


def _forward(heads_at: int, sequence_at: int) -> Callable[[Call], Cost]:
    def formula(call: Call) -> Cost:
        q, k, v = (call.tensor(place) for place in range(3))
        _refuse_packed(call)
        sizes = _sizes(q, k, v, heads_at, sequence_at)
        out = q.elements // (sizes.deep or 1) * sizes.deep_v
        return Cost(flops=sizes.scores + sizes.values, moved=_moved([q, k, v], out))

    return formula


def _backward(heads_at: int, sequence_at: int) -> Callable[[Call], Cost]:
    def formula(call: Call) -> Cost:
        gradient, q, k, v = (call.tensor(place) for place in range(4))
        _refuse_packed(call)
        sizes = _sizes(q, k, v, heads_at, sequence_at)
        written = q.elements + k.elements + v.elements
        # The forward's output is read as well, and is as large as its gradient.
        return Cost(
            flops=3 * sizes.scores + 2 * sizes.values,
            again=sizes.scores,
            moved=_moved([gradient, gradient, q, k, v], written),
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


matmul_like(*_HEADS_FIRST)(_forward(1, 2))
matmul_like(*_HEADS_FIRST_BACKWARD)(_backward(1, 2))
matmul_like(*_SEQUENCE_FIRST)(_forward(2, 1))
matmul_like(*_SEQUENCE_FIRST_BACKWARD)(_backward(2, 1))


@matmul_like(*_PACKED)
def packed(_: Call) -> Cost:
    """Unknown."""
    raise Unknown


@matmul_like("FlashAttnQKVPackedFunc")
def together(call: Call) -> Cost:
    """q, k and v in one tensor [batch, sequence, 3, heads, deep]."""
    whole = call.tensor(0)
    batch, length, three, heads, deep = whole.dims
    if three != 3:
        raise Unknown
    one = Tensor((batch, length, heads, deep), whole.dtype)
    sizes = _sizes(one, one, one, 2, 1)
    return Cost(flops=sizes.scores + sizes.values, moved=_moved([one] * 3, one.elements))
