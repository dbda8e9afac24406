"""Short floats with a scale a block, and 4 bits with stochastic rounding, as Triton kernels.

The same operations in the same order as on CPUs. Fused multiply-add is off where it would round
differently.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.fix.saved.encodings.lossy import (
    BLOCK,
    GROUP,
    LEAST_STEP,
    LEVELS,
    MOST_SHIFT,
    ShortFloat,
)

_GROUPS = 8  # blocks or groups a program
_WARPS = 4


@dataclass(frozen=True, slots=True)
class ScaledBlocks:
    values: Tensor
    shifts: Tensor


@triton.jit
def _to_eight_bits(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The nearest 8-bit float, ties to even, as torch rounds; the value must be in its range.

    By integers, so that every device gives the same bits."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    # Adding it rounds to the smallest step that the short type has.
    STEP: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    STEP_PATTERN: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    magnitude = tl.abs(value)
    pattern = magnitude.to(tl.int32, bitcast=True)
    small = (magnitude + STEP).to(tl.int32, bitcast=True) - STEP_PATTERN
    rounded = pattern + ((1 << (SHIFT - 1)) - 1) + ((pattern >> SHIFT) & 1)
    normal = (rounded >> SHIFT) - ((127 - BIAS) << MANTISSA)
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), small, normal)
    code = code | ((value.to(tl.int32, bitcast=True) >> 24) & 128)
    return tl.where(value == value, code, 127).to(tl.uint8)


@triton.jit
def _from_eight_bits(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    code = code.to(tl.int32)
    fraction, exponent = code & ((1 << MANTISSA) - 1), (code & 127) >> MANTISSA
    small = fraction.to(tl.float32) * 2.0 ** (1 - BIAS - MANTISSA)
    pattern = ((exponent + (127 - BIAS)) << 23) | (fraction << (23 - MANTISSA))
    value = tl.where(exponent == 0, small, pattern.to(tl.float32, bitcast=True))
    value = tl.where((code & 127) == 127, float("nan"), value)
    return tl.where((code & 128) != 0, -value, value)


@triton.jit
def _pack_blocks(
    values, short, shifts, count, TOP: tl.constexpr, MOST: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = places < count
    value = tl.load(values + places, mask=inside, other=0).to(tl.float32)
    magnitude = tl.abs(value)
    finite = magnitude <= 3.4028234663852886e38
    largest = tl.max(tl.where(finite, magnitude, 0.0), axis=1)
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 255, 1) - 126
    shift = tl.minimum(TOP - exponent, MOST)
    scale = ((shift + 127) << 23).to(tl.float32, bitcast=True)
    scaled = tl.where(finite, value * scale[:, None], float("nan"))
    if MANTISSA == 10:
        tl.store(short + places, scaled.to(tl.float16), mask=inside)
    else:
        tl.store(short + places, _to_eight_bits(scaled, MANTISSA, BIAS), mask=inside)
    tl.store(shifts + rows, shift.to(tl.int8), mask=rows * BLOCK < count)


@triton.jit
def _unpack_blocks(
    short, shifts, values, count, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = places < count
    shift = tl.load(shifts + rows, mask=rows * BLOCK < count, other=0).to(tl.int32)
    scale = ((127 - shift) << 23).to(tl.float32, bitcast=True)
    loaded = tl.load(short + places, mask=inside, other=0)
    if MANTISSA == 10:
        value = loaded.to(tl.float32)
    else:
        value = _from_eight_bits(loaded, MANTISSA, BIAS)
    tl.store(values + places, (value * scale[:, None]).to(values.dtype.element_ty), mask=inside)


def _stored(short: Tensor) -> Tensor:
    """8-bit floats as bytes."""
    return short.view(torch.uint8) if short.itemsize == 1 else short


def pack_blocks(flat: Tensor, kind: ShortFloat) -> ScaledBlocks:
    count, blocks = flat.numel(), triton.cdiv(flat.numel(), BLOCK)
    short = torch.empty(count, dtype=kind.dtype, device=flat.device)
    shifts = torch.empty(blocks, dtype=torch.int8, device=flat.device)
    _pack_blocks[(triton.cdiv(blocks, _GROUPS),)](
        flat, _stored(short), shifts, count, TOP=kind.top, MOST=MOST_SHIFT,
        MANTISSA=kind.mantissa, BIAS=kind.bias, ROWS=_GROUPS, BLOCK=BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return ScaledBlocks(short, shifts)


def unpack_blocks(parts: ScaledBlocks, count: int, dtype: torch.dtype, kind: ShortFloat) -> Tensor:
    values = torch.empty(count, dtype=dtype, device=parts.values.device)
    _unpack_blocks[(triton.cdiv(len(parts.shifts), _GROUPS),)](
        _stored(parts.values), parts.shifts, values, count, MANTISSA=kind.mantissa,
        BIAS=kind.bias, ROWS=_GROUPS, BLOCK=BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return values


# 4 bits


@dataclass(frozen=True, slots=True)
class FourBitGroups:
    codes: Tensor
    lowest: Tensor
    step: Tensor


@triton.jit
def _hashed(number):
    number = number ^ (number >> 16)
    number = number * 0x7FEB352D
    number = number ^ (number >> 15)
    number = number * 0x846CA68B
    return number ^ (number >> 16)


@triton.jit
def _level(value, lowest, inverse, places, seed):
    number = _hashed(places.to(tl.uint32) ^ seed.to(tl.uint32))
    chance = (number >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24
    level = tl.floor((value - lowest) * inverse + chance)
    return tl.minimum(tl.maximum(level, 0.0), 15.0)


@triton.jit
def _pack_groups(
    values, codes, lows, steps, seed, count, LEVELS: tl.constexpr, LEAST: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pairs = tl.arange(0, GROUP // 2)
    inside = rows[:, None] * GROUP < count
    even = rows[:, None] * GROUP + pairs[None, :] * 2
    # Behind the end, the last element again.
    first = tl.load(values + tl.minimum(even, count - 1), mask=inside, other=0).to(tl.float32)
    second = tl.load(values + tl.minimum(even + 1, count - 1), mask=inside, other=0)
    second = second.to(tl.float32)
    finite = (tl.abs(first) <= 3.4028234663852886e38) & (tl.abs(second) <= 3.4028234663852886e38)
    all_finite = tl.min(finite.to(tl.int32), axis=1) != 0
    lowest = tl.min(tl.minimum(first, second), axis=1)
    highest = tl.max(tl.maximum(first, second), axis=1)
    step = tl.div_rn(highest, LEVELS * 1.0) - tl.div_rn(lowest, LEVELS * 1.0)
    inverse = tl.where(step > LEAST, tl.div_rn(1.0, tl.where(step > LEAST, step, 1.0)), 0.0)
    low = _level(first, lowest[:, None], inverse[:, None], even, seed)
    high = _level(second, lowest[:, None], inverse[:, None], even + 1, seed)
    byte = low.to(tl.int32) | (high.to(tl.int32) << 4)
    byte = tl.where(all_finite[:, None], byte, 0)
    here = rows[:, None] * (GROUP // 2) + pairs[None, :]
    tl.store(codes + here, byte.to(tl.uint8), mask=inside)
    known = rows * GROUP < count
    tl.store(lows + rows, tl.where(all_finite, lowest, float("nan")), mask=known)
    tl.store(steps + rows, step, mask=known)


@triton.jit
def _unpack_groups(codes, lows, steps, values, count, ROWS: tl.constexpr, GROUP: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, GROUP)
    places = rows[:, None] * GROUP + columns[None, :]
    inside = places < count
    known = rows * GROUP < count
    lowest = tl.load(lows + rows, mask=known, other=0)
    step = tl.load(steps + rows, mask=known, other=0)
    byte = tl.load(codes + places // 2, mask=inside, other=0).to(tl.int32)
    level = ((byte >> ((columns % 2) * 4)[None, :]) & 15).to(tl.float32)
    value = level * step[:, None] + lowest[:, None]
    tl.store(values + places, value.to(values.dtype.element_ty), mask=inside)


def pack_groups(flat: Tensor, seed: int) -> FourBitGroups:
    count, groups = flat.numel(), triton.cdiv(flat.numel(), GROUP)
    codes = torch.empty(groups * GROUP // 2, dtype=torch.uint8, device=flat.device)
    lowest = torch.empty(groups, dtype=torch.float32, device=flat.device)
    step = torch.empty_like(lowest)
    _pack_groups[(triton.cdiv(groups, _GROUPS),)](
        flat, codes, lowest, step, seed, count, LEVELS=LEVELS, LEAST=LEAST_STEP, ROWS=_GROUPS,
        GROUP=GROUP, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return FourBitGroups(codes, lowest, step)


def unpack_groups(parts: FourBitGroups, count: int, dtype: torch.dtype) -> Tensor:
    values = torch.empty(count, dtype=dtype, device=parts.codes.device)
    _unpack_groups[(triton.cdiv(len(parts.lowest), _GROUPS),)](
        parts.codes, parts.lowest, parts.step, values, count, ROWS=_GROUPS, GROUP=GROUP,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return values
