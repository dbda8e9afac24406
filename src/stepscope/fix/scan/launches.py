"""How the scan's kernels are started on a device: how long a chunk is (records/scan_costs.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.fix.scan.device_size import multiprocessors
from stepscope.fix.scan.kernels import Launch
from stepscope.records.scan_costs import gpu_chunk

if TYPE_CHECKING:
    import torch


def launch_for(shape: torch.Size, device: torch.device) -> Launch:
    """`shape` is steps, batch and size."""
    steps, batch, size = shape
    return Launch(gpu_chunk(steps, batch, size, multiprocessors(device)))
