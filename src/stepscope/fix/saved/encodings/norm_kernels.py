"""A batch norm's result from its statistics, with a sum and a ReLU behind it, in one Triton kernel.

Each form rounds as some library's kernel does; products and sums are fused only where it says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024
_FORMS = {"weighted": 0, "scaled": 1, "centred": 2, "shift": 3}


@triton.jit(do_not_specialize=["count", "inner", "channels"])
def _normalise(
    values, weights, biases, means, inverses, residuals, results, count, inner, channels,
    FORM: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = places < count
    channel = (places // inner) % channels
    value = tl.load(values + places, mask=known, other=0).to(tl.float32)
    weight = tl.load(weights + channel, mask=known, other=0).to(tl.float32)
    bias = tl.load(biases + channel, mask=known, other=0).to(tl.float32)
    mean = tl.load(means + channel, mask=known, other=0).to(tl.float32)
    inverse = tl.load(inverses + channel, mask=known, other=0).to(tl.float32)
    if FORM == 0:
        result = tl.fma(weight * (value - mean), inverse, bias)
    elif FORM == 1:
        result = tl.fma(value - mean, inverse * weight, bias)
    elif FORM == 2:
        result = tl.fma((value - mean) * inverse, weight, bias)
    else:
        scale = inverse * weight
        result = tl.fma(value, scale, tl.fma(-mean, scale, bias))
    kind = results.dtype.element_ty
    result = result.to(kind)
    if ADDS:
        other = tl.load(residuals + places, mask=known, other=0).to(tl.float32)
        result = (result.to(tl.float32) + other).to(kind)
    if RELU:
        result = tl.where(result.to(tl.float32) <= 0, 0.0, result.to(tl.float32)).to(kind)
    tl.store(results + places, result, mask=known)


def normalise(
    form: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    inverse: Tensor,
    *,
    inner: int,
    residual: Tensor | None,
    relu: bool,
) -> Tensor:
    """`inner` neighbours in memory share a channel; a residual lies in memory as `x` does."""
    result, count = torch.empty_like(x), x.numel()
    _normalise[(triton.cdiv(count, _BLOCK),)](
        x, weight, bias, mean, inverse, result if residual is None else residual, result, count,
        inner, x.shape[1], FORM=_FORMS[form], ADDS=residual is not None, RELU=relu, BLOCK=_BLOCK,
    )  # fmt: skip
    return result
