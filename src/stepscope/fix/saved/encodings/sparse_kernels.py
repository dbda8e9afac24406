"""A mask and what is not zero, as Triton kernels: count in blocks, add up, gather."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # elements a program, a multiple of 8
_WARPS = 4


@dataclass(frozen=True, slots=True)
class NonZeroParts:
    """`starts`: where the values of each block begin; `total`: how many values there were."""

    mask: Tensor
    values: Tensor
    starts: Tensor
    total: Tensor


@triton.jit
def _count_nonzero(patterns, mask, counts, count, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    rows = block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    columns = tl.arange(0, 8)
    places = rows[:, None] * 8 + columns[None, :]
    pattern = tl.load(patterns + places, mask=places < count, other=0)
    bit = (pattern != 0).to(tl.int32)
    byte = tl.sum(bit << columns[None, :], axis=1)
    tl.store(mask + rows, byte.to(tl.uint8), mask=rows * 8 < count)
    tl.store(counts + block, tl.sum(tl.sum(bit, axis=1), axis=0).to(tl.int64))


@triton.jit
def _gather_nonzero(patterns, ends, counts, values, count, room, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    places = block * BLOCK + tl.arange(0, BLOCK)
    pattern = tl.load(patterns + places, mask=places < count, other=0)
    bit = (pattern != 0).to(tl.int32)
    start = tl.load(ends + block) - tl.load(counts + block)
    target = start + tl.cumsum(bit, axis=0) - 1
    tl.store(values + target, pattern, mask=(bit != 0) & (target < room))


@triton.jit
def _spread_nonzero(mask, starts, values, patterns, count, room, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    places = block * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    byte = tl.load(mask + places // 8, mask=inside, other=0).to(tl.int32)
    bit = (byte >> (places % 8).to(tl.int32)) & 1
    source = tl.load(starts + block) + tl.cumsum(bit, axis=0) - 1
    value = tl.load(values + source, mask=(bit != 0) & (source < room), other=0)
    tl.store(patterns + places, value, mask=inside)


def pack_nonzero(patterns: Tensor, room: int) -> NonZeroParts:
    """Pack flat integers that are not zero; values beyond `room` are dropped."""
    count, device = patterns.numel(), patterns.device
    blocks = triton.cdiv(count, _BLOCK)
    mask = torch.empty(-(-count // 8), dtype=torch.uint8, device=device)
    counts = torch.empty(blocks, dtype=torch.int64, device=device)
    values = torch.empty(room, dtype=patterns.dtype, device=device)
    _count_nonzero[(blocks,)](patterns, mask, counts, count, BLOCK=_BLOCK, num_warps=_WARPS)
    ends = counts.cumsum(0)
    _gather_nonzero[(blocks,)](
        patterns, ends, counts, values, count, room, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return NonZeroParts(mask, values, ends - counts, ends[-1].clone())


def unpack_nonzero(parts: NonZeroParts, count: int) -> Tensor:
    patterns = torch.empty(count, dtype=parts.values.dtype, device=parts.values.device)
    _spread_nonzero[(len(parts.starts),)](
        parts.mask, parts.starts, parts.values, patterns, count, len(parts.values),
        BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return patterns
