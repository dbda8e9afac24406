"""`bf16`, `fp16`, `fp8-e4m3`, `fp8-e5m2`: fewer bits an element, with a scale a block. Lossy.

A block of 256 elements is multiplied by the power of two that brings its largest element near the
top of the short type's range; one byte an exponent keeps it. bf16 has float32's range and needs no
scale. NaN and infinities come back as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepscope.fix.saved.encodings.device_kernels import kernels_for
from stepscope.fix.saved.encodings.encoded import Encoded, whole

BLOCK = 256
MOST_SHIFT = 120  # so that a scale is an ordinary float32


@dataclass(frozen=True, slots=True)
class ShortFloat:
    """`top`: the largest element of a block is brought below 2 ** top."""

    dtype: torch.dtype
    top: int
    mantissa: int  # bits
    bias: int  # of the exponent


SHORT_FLOATS = {
    "fp16": ShortFloat(torch.float16, 15, 10, 15),
    "fp8-e4m3": ShortFloat(torch.float8_e4m3fn, 8, 3, 7),
    "fp8-e5m2": ShortFloat(torch.float8_e5m2, 15, 2, 15),
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
    kernels = kernels_for(flat, "block_kernels")
    if kernels is not None:
        parts = kernels.pack_blocks(flat, kind)
        size_bytes = parts.values.nbytes + parts.shifts.nbytes
        return Encoded(size_bytes, lambda: kernels.unpack_blocks(parts, count, dtype, kind))
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
    """Of int32 exponents from -126 to 127."""
    return ((exponents + 127) << 23).view(torch.float32)
