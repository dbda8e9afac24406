"""How the scan's kernels are started: how long a chunk is, by a small model of their cost.

A chunk's fold and its replay take `chunk` steps each, one after the other; chunks, sequences and
blocks of rows run at the same time, as many as the device holds. So long chunks wait for their own
steps, and short ones for a place on the device and for the carries between them.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from stepscope.fix.scan.kernels import GROUP, Launch

_CHUNKS = (8, 16, 32, 64, 128, 256, 512, 1024)
_PER_MULTIPROCESSOR = 24  # programs of one warp that run at the same time
_FOLD_US = {16: 0.35, 32: 0.6, 64: 1.6, 128: 5.0}  # one step of a block of rows, by padded size
_REPLAY_US = {16: 0.5, 32: 0.6, 64: 0.9, 128: 1.8}  # one step of sixteen sequences
_CARRY_US = 1.0  # one map of a group, and its launch shared among them
_MAPS_BYTES = 1 << 30


def launch_for(shape: torch.Size, device: torch.device) -> Launch:
    """`shape` is steps, batch and size."""
    steps, batch, size = shape
    return _launch(steps, batch, size, _multiprocessors(device))


@lru_cache(maxsize=256)
def _launch(steps: int, batch: int, size: int, multiprocessors: int) -> Launch:
    allowed = [
        chunk
        for chunk in _CHUNKS
        if 4 * -(-steps // chunk) * batch * size * size <= _MAPS_BYTES or chunk == _CHUNKS[-1]
    ]
    chunk = min(allowed, key=lambda chunk: cost_us(chunk, steps, batch, size, multiprocessors))
    return Launch(chunk)


def cost_us(chunk: int, steps: int, batch: int, size: int, multiprocessors: int) -> float:
    """Expected microseconds of a backward pass through the states."""
    padded = max(16, 1 << (size - 1).bit_length())
    chunks, places = -(-steps // chunk), _PER_MULTIPROCESSOR * multiprocessors
    fold = max(1.0, chunks * batch * (-(-size // 32)) / places) * chunk * _FOLD_US[padded]
    replay = max(1.0, chunks * -(-batch // 16) / places) * chunk * _REPLAY_US[padded]
    carries, level = 0.0, chunks
    while level > 1:
        carries += 2 * min(level, GROUP) * _CARRY_US
        level = -(-level // GROUP) if level > GROUP else 1
    return fold + replay + carries


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
