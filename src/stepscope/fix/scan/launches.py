"""How the scan's kernels are started: how long a chunk is, by a small model of their cost.

A chunk's fold and its replay take `chunk` steps each, one after the other; chunks, sequences and
blocks of rows run at the same time, as many as the device holds. So long chunks wait for their own
steps, and short ones for a place on the device and for the carries between them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from stepscope.fix.scan.device_size import multiprocessors
from stepscope.fix.scan.kernels import GROUP, Launch

if TYPE_CHECKING:
    import torch

_CHUNKS = (8, 16, 32, 64, 128, 256, 512, 1024)
# Microseconds on an H200, by padded size. Those of size 32 were measured (scan_table.py), the
# others follow by the products' sizes.
_FOLD_US = {16: 0.7, 32: 0.95, 64: 1.6, 128: 5.0}  # a step of one program, which waits for itself
_REPLAY_US = {16: 0.6, 32: 0.78, 64: 0.9, 128: 1.8}
_FOLD_SHARE_US = {16: 0.06, 32: 0.2, 64: 1.0, 128: 5.0}  # of a multiprocessor that is full
_MAP_US = 1.0  # a map of a group, which waits for the one behind it
_MAP_SHARE_US = 1.3
_LAUNCH_US = 42.0  # on the host, which launches while the device computes
_MAPS_BYTES = 1 << 30


def launch_for(shape: torch.Size, device: torch.device) -> Launch:
    """`shape` is steps, batch and size."""
    steps, batch, size = shape
    return _launch(steps, batch, size, multiprocessors(device))


@lru_cache(maxsize=256)
def _launch(steps: int, batch: int, size: int, processors: int) -> Launch:
    allowed = [
        chunk
        for chunk in _CHUNKS
        if 4 * -(-steps // chunk) * batch * size * size <= _MAPS_BYTES or chunk == _CHUNKS[-1]
    ]
    chunk = min(allowed, key=lambda chunk: cost_us(chunk, steps, batch, size, processors))
    return Launch(chunk)


def cost_us(chunk: int, steps: int, batch: int, size: int, processors: int) -> float:
    """Expected microseconds of a backward pass through the states."""
    padded = max(16, 1 << (size - 1).bit_length())
    chunks, blocks = -(-steps // chunk), -(-size // 32)
    full = steps * batch * blocks * _FOLD_SHARE_US[padded] / processors
    fold = max(chunk * _FOLD_US[padded], full)
    replay = max(1.0, chunks * -(-batch // 16) / processors) * chunk * _REPLAY_US[padded]
    levels, carries = _carries(chunks, batch, processors)
    return max(fold + replay + carries, _LAUNCH_US * (1 + 2 * levels))


def _carries(maps: int, batch: int, processors: int) -> tuple[int, float]:
    """Levels until one group is left, and microseconds: maps are folded on the way up and spread
    on the way down."""
    full = maps * batch * _MAP_SHARE_US / processors
    if maps <= GROUP:
        return 1, max(maps * _MAP_US, full)
    levels, above = _carries(-(-maps // GROUP), batch, processors)
    return levels + 1, max(2 * GROUP * _MAP_US, full) + above
