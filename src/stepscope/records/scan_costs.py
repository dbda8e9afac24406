"""What a backward pass by the scan costs: a small model, by which chunks are chosen and gains
predicted.

On a GPU a chunk's fold and its replay take `chunk` steps each, one after the other; chunks,
sequences and blocks of rows run at the same time, as many as the device holds. So long chunks wait
for their own steps, and short ones for a place on the device and for the carries between them.

On a CPU nothing runs at the same time: a fold only pays where its matrices are so small that the
calls cost more than the arithmetic. Elsewhere one chunk, which is a plain loop, is the best.
"""

from __future__ import annotations

import math
from functools import lru_cache

GROUP = 16  # maps that fold into one
LARGEST_SIZE = 128  # of a state that the GPU's kernels keep in registers
LARGEST_LSTM = 32  # larger ones go back by batched products on a GPU, and lose to cuDNN there
FUSED_SIZE = 32  # of a state and an input whose whole backward pass is fused
_CHUNKS = (8, 16, 32, 64, 128, 256, 512, 1024)
# Microseconds on an H200, by padded size. Those of size 32 and the shares of 64 and 128 were
# measured (scan_table.py), the others follow by the products' sizes.
_FOLD_US = {16: 0.7, 32: 0.95, 64: 1.6, 128: 5.0}  # a step of one program, which waits for itself
_REPLAY_US = {16: 0.6, 32: 0.78, 64: 0.9, 128: 1.8}
_FOLD_SHARE_US = {16: 0.06, 32: 0.2, 64: 0.68, 128: 4.15}  # of a multiprocessor that is full
_MAP_US = 1.0  # a map of a group, which waits for the one behind it
_MAP_SHARE_US = 1.3
_LAUNCH_US = 42.0  # on the host, which launches while the device computes
_MAPS_BYTES = 1 << 30
# Of the fused kernels, by the instructions of their loops (compiled for sm_90); the shares were
# measured, by padded size. Chunks are chosen by the share of 32.
_FUSED_FOLD_US, _FUSED_MAP_US, _FUSED_REPLAY_US = 0.7, 0.3, 0.5
_FUSED_FOLD_SHARE_US = {16: 0.04, 32: 0.12}
# What the host takes for a ScanRNN: medians of the cells of benchmarks/measured/scan_h200.json
# whose kernels take less. Backward with autograd, by fused kernels or by parts and their levels;
# and what forward takes longer than nn.RNN's.
_FUSED_HOST_US, _PARTS_HOST_US, _LEVEL_HOST_US = 470.0, 450.0, 330.0
FORWARD_HOST_US = 160.0
WORTH = 1.05  # times as fast: less is not worth another module
_WEIGHTS_BYTES_US = 2.0e6  # bytes a microsecond: what sums over all steps reach on an H200

# One core of an ARM server, torch 2.13: a call of torch, and an element of a map through one step.
_CALL_US, _ELEMENT_US, _FLOPS_US = 4.0, 0.012, 16e3
_CALLS_A_STEP, _CALLS_A_CHUNK_STEP, _CALLS_A_GROUP = 3, 30, 560


@lru_cache(maxsize=256)
def gpu_chunk(steps: int, batch: int, size: int, processors: int) -> int:
    """The chunk that the model expects to be the fastest, of those whose maps fit in memory."""
    allowed = [
        chunk
        for chunk in _CHUNKS
        if 4 * -(-steps // chunk) * batch * size * size <= _MAPS_BYTES or chunk == _CHUNKS[-1]
    ]
    return min(allowed, key=lambda chunk: gpu_states_us(chunk, steps, batch, size, processors))


def gpu_states_us(chunk: int, steps: int, batch: int, size: int, processors: int) -> float:
    """Expected microseconds of a backward pass through the states of one layer."""
    padded = max(16, 1 << (size - 1).bit_length())
    chunks, blocks = -(-steps // chunk), -(-size // 32)
    full = steps * batch * blocks * _FOLD_SHARE_US[padded] / processors
    fold = max(chunk * _FOLD_US[padded], full)
    replay = max(1.0, chunks * -(-batch // 16) / processors) * chunk * _REPLAY_US[padded]
    levels, carries = _carries(chunks, batch, processors)
    return max(fold + replay + carries, _LAUNCH_US * (1 + 2 * levels))


def gpu_layer_us(steps: int, batch: int, size: int, features: int, processors: int) -> float:
    """The same with the gradients of weights and inputs, and with the host's work where that takes
    longer; sizes up to LARGEST_SIZE."""
    if is_fused(size, features):
        chunk, padded = fused_chunk(steps, batch, processors), 16 if size <= 16 else 32
        return max(_FUSED_HOST_US, _fused_us(chunk, steps, batch, processors, padded))
    chunk = gpu_chunk(steps, batch, size, processors)
    levels, _ = _carries(-(-steps // chunk), batch, processors)
    moved = 4 * steps * batch * (3 * size + 2 * features)
    device = gpu_states_us(chunk, steps, batch, size, processors) + moved / _WEIGHTS_BYTES_US
    return max(_PARTS_HOST_US + _LEVEL_HOST_US * levels, device)


def gpu_scan_pays(
    now_us: float, shape: tuple[int, int, int, int], processors: int, layers: int = 1
) -> bool:
    """Whether the scan is expected to beat a backward pass that takes `now_us` on a GPU, by enough
    to make up for its slower forward pass. `shape` is steps, batch, size (up to LARGEST_SIZE) and
    features."""
    return now_us > WORTH * layers * (gpu_layer_us(*shape, processors) + FORWARD_HOST_US)


def is_fused(size: int, features: int) -> bool:
    """Whether the whole backward pass of a layer is one fold and one replay."""
    return max(size, features) <= FUSED_SIZE


@lru_cache(maxsize=256)
def fused_chunk(steps: int, batch: int, processors: int) -> int:
    """The chunk that the model expects to be the fastest where all is fused."""
    return min(_CHUNKS, key=lambda chunk: _fused_us(chunk, steps, batch, processors))


def _fused_us(chunk: int, steps: int, batch: int, processors: int, padded: int = 32) -> float:
    chunks, blocks = -(-steps // chunk), -(-batch // 16)
    fold = max(chunk * _FUSED_FOLD_US, steps * batch * _FUSED_FOLD_SHARE_US[padded] / processors)
    rounds = max(1.0, chunks * blocks / (2 * processors))
    return fold + chunks * _FUSED_MAP_US + rounds * chunk * _FUSED_REPLAY_US


def _carries(maps: int, batch: int, processors: int) -> tuple[int, float]:
    """Levels until one group is left, and microseconds: maps are folded on the way up and spread
    on the way down."""
    full = maps * batch * _MAP_SHARE_US / processors
    if maps <= GROUP:
        return 1, max(maps * _MAP_US, full)
    levels, above = _carries(-(-maps // GROUP), batch, processors)
    return levels + 1, max(2 * GROUP * _MAP_US, full) + above


@lru_cache(maxsize=256)
def cpu_chunk(steps: int, batch: int, size: int) -> int:
    """The chunk that is the fastest by the model; all steps where a plain loop is."""
    chunks = [1 << power for power in range(2, max(3, steps.bit_length()))]
    fitting = [chunk for chunk in chunks if chunk < steps]
    return min([steps, *fitting], key=lambda chunk: cpu_states_us(chunk, steps, batch, size))


def cpu_states_us(chunk: int, steps: int, batch: int, size: int) -> float:
    """Expected microseconds of a backward pass through the states of one layer."""
    if chunk >= steps:
        return steps * (_CALLS_A_STEP * _CALL_US + 2 * batch * size**2 / _FLOPS_US)
    levels = max(1, math.ceil(math.log(max(2, steps / chunk), GROUP)))
    calls = chunk * _CALLS_A_CHUNK_STEP + levels * _CALLS_A_GROUP
    elements = steps * batch * size**2
    return calls * _CALL_US + elements * (_ELEMENT_US + 2 * size / _FLOPS_US)
