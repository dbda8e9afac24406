"""`narrow TYPE`: integers in a type as short as their values allow."""

from __future__ import annotations

import torch

from stepscope.fix.saved.encodings.encoded import Encoded, whole
from stepscope.fix.saved.encodings.pending_check import PendingCheck
from stepscope.fix.saved.graph_capture import is_capturing

_TYPES = {"uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16, "int32": torch.int32}


def narrow_spec(tensor: torch.Tensor) -> str | None:
    """None where nothing shorter fits. Waits for the device."""
    flat = whole(tensor)
    if flat is None or flat.dtype not in (torch.int16, torch.int32, torch.int64):
        return None
    low, high = (int(limit) for limit in torch.aminmax(flat))
    for name, dtype in _TYPES.items():
        limits = torch.iinfo(dtype)
        if limits.min <= low and high <= limits.max and dtype.itemsize < flat.itemsize:
            return f"narrow {name}"
    return None


def encode_narrow(tensor: torch.Tensor, name: str) -> Encoded | None:
    flat = whole(tensor)
    if flat is None or flat.dtype.is_floating_point or is_capturing():
        return None
    dtype, limits = flat.dtype, torch.iinfo(_TYPES[name])
    low, high = torch.aminmax(flat)
    fits = (low >= limits.min) & (high <= limits.max)
    on_host = flat.device.type == "cpu"
    if on_host and not bool(fits):
        return None
    short = flat.to(_TYPES[name])
    check = None if on_host else PendingCheck(fits)
    return Encoded(short.nbytes, lambda: short.to(dtype), check)
