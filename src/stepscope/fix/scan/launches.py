"""How the scan's kernels are started on a device: how long a chunk is (records/scan_costs.py), and
how many warps share a product."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.fix.scan.device_size import multiprocessors
from stepscope.fix.scan.kernels import Launch, padded_size, plain_warps
from stepscope.records.scan_costs import gpu_chunk

if TYPE_CHECKING:
    import torch

# Of steps, of maps and of the replay, by padded size: the fewest whose registers hold everything,
# or nearly (ptxas for sm_90).
_WARPS = {16: (1, 1, 1), 32: (1, 1, 1), 64: (2, 4, 4), 128: (4, 8, 8)}


def launch_for(shape: torch.Size, device: torch.device, precision: str) -> Launch:
    """`shape` is steps, batch and size."""
    steps, batch, size = shape
    padded = padded_size(size)
    warps = (plain_warps(padded),) * 3 if precision == "ieee" else _WARPS[padded]
    return Launch(gpu_chunk(steps, batch, size, multiprocessors(device)), *warps)
