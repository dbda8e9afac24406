"""Triton kernels of this package, where they run and give what torch gives.

A kernel module has `agrees(device)`, which compares it with torch on a small example. It is asked
once for each device; without Triton, or where the two differ, torch computes as before.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepscope.fix.fuse.stacked import is_ordinary

if TYPE_CHECKING:
    import torch

_known: dict[tuple[str, torch.device], Any] = {}


def proven_kernels(module: str, tensor: torch.Tensor) -> Any:
    """The module, for tensors on this one's device; None where torch has to compute."""
    on_cuda = tensor.is_cuda
    if not (on_cuda or os.environ.get("TRITON_INTERPRET") == "1") or not is_ordinary(tensor):
        return None
    key = (module, tensor.device)
    if key not in _known:
        if on_cuda and _is_capturing():
            return None
        _known[key] = _proven(*key)
    return _known[key]


def _proven(module: str, device: torch.device) -> Any:
    try:
        kernels = import_module(f"stepscope.fix.fuse.{module}")
        return kernels if kernels.agrees(device) else None
    except Exception:  # no Triton, no compiler for it, or a device that it does not know
        return None


def _is_capturing() -> bool:
    import torch

    return bool(torch.cuda.is_current_stream_capturing())
