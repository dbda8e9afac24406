"""`sparse SHARE`: a mask of what is not zero, and those elements one after the other.

Zero means all bits zero: -0.0 and NaN are kept as they are. SHARE is how much was not zero in the
recorded pass. On a GPU there is room for slightly more; where that is not enough, the plain tensor
is kept.
"""

from __future__ import annotations

import torch

from stepscope.fix.saved.encodings.bits import pack_bits, packed_bytes, unpack_bits
from stepscope.fix.saved.encodings.device_kernels import kernels_for
from stepscope.fix.saved.encodings.encoded import BITS_OF, Encoded, whole
from stepscope.fix.saved.encodings.pending_check import PendingCheck
from stepscope.fix.saved.graph_capture import is_capturing

_WORTH = 0.9  # of the plain bytes: a value that compresses less is left alone
_ROOM = 1.05


def sparse_spec(tensor: torch.Tensor) -> str | None:
    """None where it does not compress. Waits for the device."""
    flat = whole(tensor)
    if flat is None or not flat.is_floating_point():
        return None
    count = int(torch.count_nonzero(flat.view(BITS_OF[flat.itemsize])))
    share = round(count / flat.numel(), 4)
    return f"sparse {share}" if _size(flat, count) <= _WORTH * flat.nbytes else None


def _size(flat: torch.Tensor, count: int) -> int:
    return packed_bytes(flat.numel()) + count * int(flat.itemsize)


def encode_sparse(tensor: torch.Tensor, share: float) -> Encoded | None:
    flat = whole(tensor)
    if flat is None or is_capturing():  # how much is not zero differs from step to step
        return None
    dtype, count = flat.dtype, flat.numel()
    patterns = flat.view(BITS_OF[flat.itemsize])
    kernels = kernels_for(flat, "sparse_kernels")
    if kernels is not None:
        room = min(count, int(count * share * _ROOM) + 64)
        parts = kernels.pack_nonzero(patterns, room)
        return Encoded(
            parts.mask.nbytes + parts.values.nbytes + parts.starts.nbytes,
            lambda: kernels.unpack_nonzero(parts, count).view(dtype),
            PendingCheck(parts.total <= room),
        )
    mask = patterns != 0
    values = patterns[mask]
    if _size(flat, values.numel()) > _WORTH * flat.nbytes:
        return None
    packed = pack_bits(mask)

    def decode() -> torch.Tensor:  # must not name the tensor: it would be held as well
        decoded = torch.zeros(count, dtype=values.dtype, device=packed.device)
        return decoded.masked_scatter_(unpack_bits(packed, count), values).view(dtype)

    return Encoded(packed.nbytes + values.nbytes, decode)
