"""Whether a CUDA graph is being captured: what runs then is repeated as it is, without Python."""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    """Nothing may wait for the device then, nor depend on what a tensor holds."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
