"""Encodings that round: bf16, fp16 and fp8 with a scale a block, and 4 bits with stochastic
rounding. NaN and infinities come back as NaN.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from stepscope.fix.saved.encodings.encoded import Encoded, whole
from stepscope.fix.saved.encodings.exact import pack_codes, unpack_codes

# `fp16`, `fp8-e4m3`, `fp8-e5m2`: a block of 256 elements is multiplied by the power of two that
# brings its largest element below 2 ** top; one byte an exponent keeps it. bf16 has float32's range
# and needs no scale.

_BLOCK = 256
_MOST_SHIFT = 120  # so that a scale is an ordinary float32
_SHORT = {
    "fp16": (torch.float16, 15),
    "fp8-e4m3": (torch.float8_e4m3fn, 8),
    "fp8-e5m2": (torch.float8_e5m2, 15),
}
_ROUNDED = (torch.float32, torch.float16, torch.bfloat16)


def encode_reduced(tensor: torch.Tensor, name: str) -> Encoded | None:
    flat = whole(tensor)
    if flat is None or flat.dtype not in _ROUNDED:
        return None
    dtype, count = flat.dtype, flat.numel()
    if name == "bf16":
        plain = flat.to(torch.bfloat16)
        return Encoded(plain.nbytes, lambda: plain.to(dtype)) if dtype.itemsize > 2 else None
    kind, top = _SHORT[name]
    if kind.itemsize >= flat.itemsize:
        return None
    blocks = torch.nn.functional.pad(flat.float(), (0, -count % _BLOCK)).view(-1, _BLOCK)
    finite = blocks.isfinite()
    largest = torch.where(finite, blocks.abs(), 0).amax(1)
    exponent = ((largest.view(torch.int32) >> 23) & 255).clamp(min=1) - 126
    shifts = (top - exponent).clamp(max=_MOST_SHIFT)
    scaled = torch.where(finite, blocks * _power_of_two(shifts)[:, None], torch.nan)
    short, shifts = scaled.to(kind), shifts.to(torch.int8)

    def decode() -> torch.Tensor:
        decoded = short.float() * _power_of_two(-shifts.int())[:, None]
        return decoded.flatten()[:count].to(dtype)

    return Encoded(count * kind.itemsize + shifts.nbytes, decode)


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return powers of two for int32 exponents from -126 to 127."""
    return ((exponents + 127) << 23).view(torch.float32)


# `4-bit`: groups of 128 elements on 16 even steps from their smallest to their largest. Rounding is
# up or down by chance, so that errors cancel on average. The chance is a hash of the element's
# place and of how many tensors were encoded before: torch's random numbers are not used.

_GROUP, _LEVELS = 128, 15
_LEAST_STEP = 2.0**-120  # a group within smaller steps becomes its smallest element
_SEEDS = itertools.count()
_LOW_32 = 0xFFFFFFFF


def encode_four_bits(tensor: torch.Tensor) -> Encoded | None:
    flat = whole(tensor)
    if flat is None or flat.dtype not in _ROUNDED:
        return None
    dtype, count, seed = flat.dtype, flat.numel(), _hashed(next(_SEEDS))
    padding = -count % _GROUP
    values = torch.cat([flat.float(), flat[-1:].float().expand(padding)])
    groups = values.view(-1, _GROUP)
    finite = groups.isfinite().all(1)
    lowest, highest = groups.amin(1), groups.amax(1)
    step = highest / _LEVELS - lowest / _LEVELS
    inverse = torch.where(step > _LEAST_STEP, 1 / step, 0)
    places = torch.arange(groups.numel(), device=flat.device).view(-1, _GROUP)
    chance = (_hashed(places ^ seed) >> 8).float() * 2.0**-24
    levels = ((groups - lowest[:, None]) * inverse[:, None] + chance).floor().clamp(0, _LEVELS)
    levels = torch.where(finite[:, None], levels, 0)
    lowest = torch.where(finite, lowest, torch.nan)
    packed = pack_codes(levels.to(torch.uint8).flatten(), 4)

    def decode() -> torch.Tensor:
        codes = unpack_codes(packed, len(lowest) * _GROUP, 4).view(-1, _GROUP).float()
        return (codes * step[:, None] + lowest[:, None]).flatten()[:count].to(dtype)

    return Encoded(packed.nbytes + lowest.nbytes + step.nbytes, decode)


def _hashed(number: Any) -> Any:
    """32 bits that look random; the constants are Chris Wellons' lowbias32
    (nullprogram.com/blog/2018/07/31)."""
    number = number & _LOW_32
    number = number ^ (number >> 16)
    number = (number * 0x7FEB352D) & _LOW_32
    number = number ^ (number >> 15)
    number = (number * 0x846CA68B) & _LOW_32
    return number ^ (number >> 16)
