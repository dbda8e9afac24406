"""`4-bit`: groups of 128 elements on 16 even steps from their smallest to their largest. Lossy.

Rounding is up or down by chance, so that errors cancel on average. The chance is a hash of the
element's place and of how many tensors were encoded before: torch's random numbers are not used. A
group with NaN or an infinity comes back as NaN.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from stepscope.fix.saved.encodings.bits import pack_codes, unpack_codes
from stepscope.fix.saved.encodings.device_kernels import kernels_for
from stepscope.fix.saved.encodings.encoded import Encoded, whole

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
    kernels = kernels_for(flat, "block_kernels")
    if kernels is not None:
        parts = kernels.pack_groups(flat, seed)
        size_bytes = parts.codes.nbytes + parts.lowest.nbytes + parts.step.nbytes
        return Encoded(size_bytes, lambda: kernels.unpack_groups(parts, count, dtype))
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
