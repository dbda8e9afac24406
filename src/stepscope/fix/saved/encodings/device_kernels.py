"""Which tensors are handled by Triton kernels."""

from __future__ import annotations

import functools
import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def kernels_for(tensor: torch.Tensor, module: str) -> Any:
    """A module of kernels for tensors on a CUDA device, or in Triton's interpreter; else None."""
    if not tensor.numel() or not (tensor.is_cuda or _interpreted()):
        return None
    return _kernels(module)


@functools.cache
def _kernels(module: str) -> Any:
    try:
        return importlib.import_module(f"stepscope.fix.saved.encodings.{module}")
    except ImportError:
        return None


@functools.cache
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
