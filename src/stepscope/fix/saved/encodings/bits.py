"""Small numbers packed into bytes: 1, 2 or 4 bits each, the first in the lowest bits."""

from __future__ import annotations

import functools

import torch

from stepscope.fix.saved.encodings.device_kernels import kernels_for
from stepscope.fix.saved.encodings.encoded import Encoded, whole

_GATHER = 0x0102040810204080  # collects the lowest bits of eight bytes in the highest byte


def packed_bytes(count: int, width: int = 1) -> int:
    return -(-count * width // 8)


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """Eight booleans of a flat tensor in one byte."""
    kernels = kernels_for(mask, "bit_kernels")
    if kernels is not None:
        return kernels.pack(mask, width=1)
    padding = -mask.numel() % 8
    if padding:
        mask = torch.nn.functional.pad(mask, (0, padding))
    eights = mask.contiguous().view(torch.uint8).view(torch.int64)
    return ((eights * _GATHER) >> 56).to(torch.uint8)


def unpack_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    kernels = kernels_for(packed, "bit_kernels")
    if kernels is not None:
        return kernels.unpack(packed, count, width=1, dtype=torch.bool)
    eights = _table(packed.device)[packed.to(torch.int64)]
    return eights.view(torch.bool)[:count]


def pack_codes(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Codes below 2 ** width of a flat uint8 tensor."""
    if width == 8:
        return codes
    if width == 1:
        return pack_bits(codes.view(torch.bool))
    kernels = kernels_for(codes, "bit_kernels")
    if kernels is not None:
        return kernels.pack(codes, width=width)
    each = 8 // width
    rows = torch.nn.functional.pad(codes, (0, -codes.numel() % each)).view(-1, each)
    packed = rows[:, 0].clone()
    for place in range(1, each):
        packed |= rows[:, place] << (place * width)
    return packed


def unpack_codes(packed: torch.Tensor, count: int, width: int) -> torch.Tensor:
    if width == 8:
        return packed
    if width == 1:
        return unpack_bits(packed, count).view(torch.uint8)
    kernels = kernels_for(packed, "bit_kernels")
    if kernels is not None:
        return kernels.unpack(packed, count, width=width, dtype=torch.uint8)
    shifts = [(packed >> shift) & (2**width - 1) for shift in range(0, 8, width)]
    return torch.stack(shifts, 1).flatten()[:count]


@functools.cache
def _table(device: torch.device) -> torch.Tensor:
    """The eight booleans that each byte stands for."""
    numbers = torch.arange(256, device=device)
    masks = (numbers[:, None] >> torch.arange(8, device=device)) & 1
    return masks.to(torch.uint8).contiguous().view(torch.int64).flatten()


def encode_bits(tensor: torch.Tensor) -> Encoded | None:
    """`bits`: a mask of booleans."""
    flat = whole(tensor)
    if flat is None or flat.dtype != torch.bool:
        return None
    count, packed = flat.numel(), pack_bits(flat)
    return Encoded(packed.nbytes, lambda: unpack_bits(packed, count))


def encode_two_valued(tensor: torch.Tensor) -> Encoded | None:
    """`two-valued`: a dropout's noise, which is 0 or one positive constant."""
    flat = whole(tensor)
    if flat is None or not flat.is_floating_point():
        return None
    count, dtype = flat.numel(), flat.dtype
    packed, constant = pack_bits(flat != 0), flat.max()

    def decode() -> torch.Tensor:
        zero = torch.zeros((), dtype=dtype, device=constant.device)
        return torch.where(unpack_bits(packed, count), constant, zero)

    return Encoded(packed.nbytes + constant.nbytes, decode)
