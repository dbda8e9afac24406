"""A norm's result from its statistics, with a sum and an activation behind it, in one Triton
kernel that moves every byte once.

Each form rounds as some library's kernel does; products and sums are fused only where it says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

_FORMS = {"weighted": 0, "scaled": 1, "centred": 2, "shift": 3, "apart": 4}
_ACTIVATIONS = {None: 0, "relu": 1, "tanh": 2, "sigmoid": 3}
_BLOCK, _SHORT_BLOCK, _BLOCK_OF_MANY_PLANES = 1024, 512, 2048
_MOST_COLUMNS = 1024


@triton.jit
def _formed(value, weight, bias, mean, inverse, FORM: tl.constexpr):
    if FORM == 0:
        result = tl.fma(weight * (value - mean), inverse, bias)
    elif FORM == 1:
        result = tl.fma(value - mean, inverse * weight, bias)
    elif FORM == 2:
        result = tl.fma((value - mean) * inverse, weight, bias)
    elif FORM == 3:
        scale = inverse * weight
        result = tl.fma(value, scale, tl.fma(-mean, scale, bias))
    else:
        scale = inverse * weight
        result = tl.fma(value, scale, bias - mean * scale)
    return result


@triton.jit
def _store(result, residuals, results, places, known, ADDS: tl.constexpr, ACTIVATION: tl.constexpr):
    """Rounded after each of the steps that torch takes."""
    kind = results.dtype.element_ty
    result = result.to(kind)
    if ADDS:
        other = tl.load(residuals + places, mask=known, other=0).to(tl.float32)
        result = (result.to(tl.float32) + other).to(kind)
    if ACTIVATION == 1:
        result = tl.where(result.to(tl.float32) <= 0, 0.0, result.to(tl.float32)).to(kind)
    elif ACTIVATION == 2:
        result = libdevice.tanh(result.to(tl.float32)).to(kind)
    elif ACTIVATION == 3:
        result = tl.div_rn(1.0, 1.0 + libdevice.exp(-result.to(tl.float32))).to(kind)
    tl.store(results + places, result, mask=known)


@triton.jit
def _first_or_second(table, first, second, is_second):
    one, other = tl.load(table + first).to(tl.float32), tl.load(table + second).to(tl.float32)
    return tl.where(is_second, other, one)


# `count` is specialised: where it is a multiple of 16, four numbers are read at once.
@triton.jit(do_not_specialize=["inner", "channels", "share"])
def _normalise_planes(
    values, weights, biases, means, inverses, residuals, results, count, inner, channels, share,
    FORM: tl.constexpr, GROUPED: tl.constexpr, WIDE: tl.constexpr, ADDS: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    places = start + tl.arange(0, BLOCK)
    known = places < count
    plane = start // inner
    within = (start - plane * inner).to(tl.int32) + tl.arange(0, BLOCK)
    if WIDE:  # a block lies in one plane, or in two: no element needs a division
        following = tl.minimum(plane + 1, (count - 1) // inner)
        beyond = within >= inner
        channel, next_channel = plane % channels, following % channels
        stat, next_stat = channel, next_channel
        if GROUPED:
            stat, next_stat = plane // share, following // share
        weight = _first_or_second(weights, channel, next_channel, beyond)
        bias = _first_or_second(biases, channel, next_channel, beyond)
        mean = _first_or_second(means, stat, next_stat, beyond)
        inverse = _first_or_second(inverses, stat, next_stat, beyond)
    else:
        further = within // inner
        channel = ((plane % channels).to(tl.int32) + further) % channels
        stat = channel.to(tl.int64)
        if GROUPED:
            stat = plane // share + ((plane % share).to(tl.int32) + further) // share
        weight = tl.load(weights + channel, mask=known, other=0).to(tl.float32)
        bias = tl.load(biases + channel, mask=known, other=0).to(tl.float32)
        mean = tl.load(means + stat, mask=known, other=0).to(tl.float32)
        inverse = tl.load(inverses + stat, mask=known, other=0).to(tl.float32)
    value = tl.load(values + places, mask=known, other=0).to(tl.float32)
    result = _formed(value, weight, bias, mean, inverse, FORM)
    _store(result, residuals, results, places, known, ADDS, ACTIVATION)


@triton.jit
def _normalise_rows(
    values, weights, biases, means, inverses, residuals, results, rows, width,
    FORM: tl.constexpr, BY_COLUMN: tl.constexpr, ADDS: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    known = (row < rows) & (column < width)
    places = row * width + column
    weight = tl.load(weights + column, mask=column < width, other=0).to(tl.float32)
    bias = tl.load(biases + column, mask=column < width, other=0).to(tl.float32)
    if BY_COLUMN:
        mean = tl.load(means + column, mask=column < width, other=0).to(tl.float32)
        inverse = tl.load(inverses + column, mask=column < width, other=0).to(tl.float32)
    else:
        mean = tl.load(means + row, mask=row < rows, other=0).to(tl.float32)
        inverse = tl.load(inverses + row, mask=row < rows, other=0).to(tl.float32)
    value = tl.load(values + places, mask=known, other=0).to(tl.float32)
    result = _formed(value, weight, bias, mean, inverse, FORM)
    _store(result, residuals, results, places, known, ADDS, ACTIVATION)


def normalise_planes(
    form: str,
    inputs: Sequence[Tensor],
    *,
    inner: int,
    share: int | None,
    residual: Tensor | None,
    activation: str | None,
) -> Tensor:
    """Of an input, weight, bias, mean and inverse deviation. `inner` neighbours in memory share a
    channel; statistics are the channels', or those of `share` channels of one sample. A residual
    lies in memory as the input does."""
    x = inputs[0]
    result, count = torch.empty_like(x), x.numel()
    block = _BLOCK if inner >= _BLOCK else _SHORT_BLOCK
    block = block if inner >= block else _BLOCK_OF_MANY_PLANES
    _normalise_planes[(triton.cdiv(count, block),)](
        *inputs, result if residual is None else residual, result, count, inner, x.shape[1],
        share or 1, FORM=_FORMS[form], GROUPED=share is not None, WIDE=inner >= block,
        ADDS=residual is not None, ACTIVATION=_ACTIVATIONS[activation], BLOCK=block,
        enable_fp_fusion=form != "apart",
    )  # fmt: skip
    return result


def normalise_rows(
    form: str,
    inputs: Sequence[Tensor],
    *,
    by_column: bool,
    residual: Tensor | None,
    activation: str | None,
) -> Tensor:
    """As above, of rows in memory: each column has its weight and bias; statistics are the rows',
    or the columns'."""
    x, width = inputs[0], inputs[1].numel()
    result = torch.empty_like(x)
    rows, columns = x.numel() // width, min(_MOST_COLUMNS, triton.next_power_of_2(width))
    rows_at_once = _MOST_COLUMNS // columns
    _normalise_rows[(triton.cdiv(rows, rows_at_once), triton.cdiv(width, columns))](
        *inputs, result if residual is None else residual, result, rows, width,
        FORM=_FORMS[form], BY_COLUMN=by_column, ADDS=residual is not None,
        ACTIVATION=_ACTIVATIONS[activation], ROWS=rows_at_once, COLUMNS=columns,
        enable_fp_fusion=form != "apart",
    )  # fmt: skip
    return result
