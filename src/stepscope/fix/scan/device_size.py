"""How many programs a device runs side by side."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
