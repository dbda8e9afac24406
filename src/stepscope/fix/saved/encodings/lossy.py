"""Encodings that round: bf16, fp16 and fp8 with a scale a block, and 4 bits with stochastic
rounding.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from stepscope.fix.saved.encodings.encoded import Encoded, whole
from stepscope.fix.saved.encodings.exact import pack_codes, unpack_codes

# `bf16`, `fp16`, `fp8-e4m3`, `fp8-e5m2`: fewer bits an element, with a scale a block. Lossy.
#
# A block of 256 elements is multiplied by the power of two that brings its largest element near the
# top of the short type's range; one byte an exponent keeps it. bf16 has float32's range and needs
# no scale. NaN and infinities come back as NaN.

BLOCK = 256
MOST_SHIFT = 120  # so that a scale is an ordinary float32


@dataclass(frozen=True, slots=True)
class ShortFloat:
    """`top`: the largest element of a block is brought below 2 ** top."""

    dtype: torch.dtype
    top: int


SHORT_FLOATS = {
    "fp16": ShortFloat(torch.float16, 15),
    "fp8-e4m3": ShortFloat(torch.float8_e4m3fn, 8),
    "fp8-e5m2": ShortFloat(torch.float8_e5m2, 15),
}


def encode_reduced(tensor: torch.Tensor, name: str) -> Encoded | None:
    flat = whole(tensor)
    if flat is None or flat.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return None
    dtype, count = flat.dtype, flat.numel()
    if name == "bf16":
        short = flat.to(torch.bfloat16)
        return Encoded(short.nbytes, lambda: short.to(dtype)) if dtype.itemsize > 2 else None
    kind = SHORT_FLOATS[name]
    if kind.dtype.itemsize >= flat.itemsize:
        return None
    values, shifts = pack_blocks(flat, kind)

    def decode() -> torch.Tensor:
        blocks = values.view(kind.dtype).float() * power_of_two(-shifts.int())[:, None]
        return blocks.flatten()[:count].to(dtype)

    return Encoded(count * kind.dtype.itemsize + shifts.nbytes, decode)


def pack_blocks(flat: torch.Tensor, kind: ShortFloat) -> tuple[torch.Tensor, torch.Tensor]:
    """The short elements in blocks, and the exponent of each block's scale."""
    blocks = torch.nn.functional.pad(flat.float(), (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    finite = blocks.isfinite()
    largest = torch.where(finite, blocks.abs(), 0).amax(1)
    exponent = ((largest.view(torch.int32) >> 23) & 255).clamp(min=1) - 126
    shifts = (kind.top - exponent).clamp(max=MOST_SHIFT)
    scaled = torch.where(finite, blocks * power_of_two(shifts)[:, None], torch.nan)
    return scaled.to(kind.dtype), shifts.to(torch.int8)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return powers of two for int32 exponents from -126 to 127."""
    return ((exponents + 127) << 23).view(torch.float32)


# `4-bit`: groups of 128 elements on 16 even steps from their smallest to their largest. Lossy.
#
# Rounding is up or down by chance, so that errors cancel on average. The chance is a hash of the
# element's place and of how many tensors were encoded before: torch's random numbers are not used.
# A group with NaN or an infinity comes back as NaN.

GROUP = 128
LEVELS = 15
LEAST_STEP = 2.0**-120  # a group within smaller steps becomes its smallest element
_SEEDS = itertools.count()
_LOW_32 = 0xFFFFFFFF


def encode_four_bits(tensor: torch.Tensor, seed: int | None = None) -> Encoded | None:
    flat = whole(tensor)
    if flat is None or flat.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return None
    dtype, count = flat.dtype, flat.numel()
    seed = hashed(next(_SEEDS) if seed is None else seed)
    codes, lowest, step = pack_groups(flat, seed)
    packed = pack_codes(codes, 4)

    def decode() -> torch.Tensor:
        levels = unpack_codes(packed, len(lowest) * GROUP, 4).view(-1, GROUP).float()
        return (levels * step[:, None] + lowest[:, None]).flatten()[:count].to(dtype)

    return Encoded(packed.nbytes + lowest.nbytes + step.nbytes, decode)


def pack_groups(flat: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes from 0 to 15, the smallest element of each group, and its step. The last group is
    filled up with its own last element."""
    padding = -flat.numel() % GROUP
    values = flat.float()
    if padding:
        values = torch.cat([values, values[-1:].expand(padding)])
    groups = values.view(-1, GROUP)
    finite = groups.isfinite().all(1)
    lowest, highest = groups.amin(1), groups.amax(1)
    levels = lowest.new_full((), LEVELS)  # a number would be multiplied by its inverse on GPUs
    step = highest / levels - lowest / levels
    inverse = torch.where(step > LEAST_STEP, 1 / step, 0)
    places = torch.arange(groups.numel(), device=flat.device).view(-1, GROUP)
    chance = (hashed(places ^ seed) >> 8).float() * 2.0**-24
    levels = ((groups - lowest[:, None]) * inverse[:, None] + chance).floor()
    levels = torch.where(finite[:, None], levels.clamp(0, LEVELS), 0)
    lowest = torch.where(finite, lowest, torch.nan)
    return levels.to(torch.uint8).flatten(), lowest, step


def hashed(number: Any) -> Any:
    """32 bits that look random; the constants are Chris Wellons' lowbias32
    (nullprogram.com/blog/2018/07/31)."""
    number = number & _LOW_32
    number = number ^ (number >> 16)
    number = (number * 0x7FEB352D) & _LOW_32
    number = number ^ (number >> 15)
    number = (number * 0x846CA68B) & _LOW_32
    return number ^ (number >> 16)
