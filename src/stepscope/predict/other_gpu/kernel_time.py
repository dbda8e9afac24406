"""How long a kernel takes on a GPU by its shape: waves of tiles, bytes, the L2 cache.

Every function works on columns of shapes and returns milliseconds of the kernel alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.predict.other_gpu.fitted import transfer_fit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.predict.other_gpu.fitted import AttentionFit, ProductFit, TransferFit
    from stepscope.predict.other_gpu.gpu import Gpu

    Floats = NDArray[np.float64]

_SPLITS = (1, 4, 16)  # of the inner dimension, whose parts are added up afterwards
_SPLIT_START_MS = 0.004
_ADDED_BYTES = 4  # parts of a split product are in fp32
_SOFTMAX_BY_WARP = 1024  # columns that one warp holds in registers: the row is read once
_VECTOR = 4  # elements that a thread reads at once
_PATCHES, _FILTERS = 128, 64  # of one block of a convolution
_NORM_THREADS, _MOST_THREADS = 128, 1024


def product_ms(
    batch: Floats,
    m: Floats,
    n: Floats,
    k: Floats,
    *,
    rate: float,
    element_bytes: float,
    gpu: Gpu,
    how: ProductFit,
) -> Floats:
    """`batch` products of (m, k) by (k, n), on the tile that suits the shape best."""
    per_multiprocessor = rate / gpu.multiprocessors / 1e3
    best = np.full(len(m), np.inf)
    for tile in how.tiles:
        for split in _SPLITS:
            blocks = batch * np.ceil(m / tile.rows) * np.ceil(n / tile.columns) * split
            waves = blocks / gpu.multiprocessors
            waves = np.maximum(1.0, how.wave * np.ceil(waves) + (1 - how.wave) * waves)
            flops = 2.0 * tile.rows * tile.columns * (k / split + how.inner)
            time = waves * flops / (per_multiprocessor * tile.share)
            if split > 1:
                added = batch * m * n * _ADDED_BYTES * (split + 1)
                time += added / (gpu.bytes_s * how.split_share) * 1e3 + _SPLIT_START_MS
            best = np.minimum(best, time)
    moved = element_bytes * batch * (m * k + n * k + m * n)
    memory = moved / gpu.bytes_s * 1e3
    total: Floats = (best**how.overlap + memory**how.overlap) ** (1 / how.overlap)
    return total


def moved_ms(moved_bytes: Floats, gpu: Gpu, fit: TransferFit | None = None) -> Floats:
    """Each byte read or written once; what stayed in the cache moves at the cache's rate."""
    cache = (fit or transfer_fit()).cache
    room = cache.fits * gpu.l2_bytes / np.maximum(moved_bytes, 1.0)
    stays = np.minimum(1.0, room) ** cache.sharpness
    rate = (1 - stays) / gpu.bytes_s + stays / max(gpu.l2_bytes_s, gpu.bytes_s)
    total: Floats = moved_bytes * rate * 1e3
    return total


def rows_ms(
    rows: Floats,
    columns: Floats,
    *,
    element_bytes: float,
    softmax: bool,
    gpu: Gpu,
    fit: TransferFit | None = None,
) -> Floats:
    """A softmax or a norm over the columns: rows are read again, from the cache while they fit."""
    fit = fit or transfer_fit()
    moved = rows * columns * element_bytes
    if softmax:
        again = np.where(columns > _SOFTMAX_BY_WARP, 2.0, 0.0)
        threads = np.clip(columns / _VECTOR, 32, _MOST_THREADS)
    else:
        again = np.ones(len(rows))
        threads = np.full(len(rows), float(_NORM_THREADS))
    at_once = np.minimum(rows, gpu.multiprocessors * np.maximum(1.0, gpu.row.threads / threads))
    filled = at_once * columns * element_bytes / (fit.cache.rereads_fit * gpu.l2_bytes)
    missed = filled**4 / (1 + filled**4)
    # Rows that threads read in vectors mostly stay next to the units that read them.
    near = np.where(softmax & (columns % _VECTOR == 0), fit.cache.aligned, fit.cache.unaligned)
    reread = missed / gpu.bytes_s + near * (1 - missed) / max(gpu.l2_bytes_s, gpu.bytes_s)
    memory = moved_ms(2 * moved, gpu, fit) + moved * again * reread * 1e3
    blocks = rows / (gpu.multiprocessors * np.maximum(1.0, gpu.row.threads / threads))
    per_row = 0.0 if softmax else fit.cache.row_cycles / (gpu.row.boost_mhz * 1e3)
    total: Floats = np.hypot(memory, blocks * per_row)
    return total


def attention_ms(
    batch: Floats,
    length: Floats,
    heads: Floats,
    kv_heads: Floats,
    width: Floats,
    *,
    rate: float,
    element_bytes: float,
    gpu: Gpu,
    how: AttentionFit,
) -> Floats:
    """Fused causal attention, forward: blocks of queries, of which the last one is the longest."""
    flops = 2.0 * batch * heads * length * length * width
    blocks = batch * heads * np.ceil(length / how.queries)
    waves = np.maximum(1.0, blocks / gpu.multiprocessors)
    waves = np.maximum(how.wave * np.ceil(waves) + (1 - how.wave) * waves, how.longest)
    per_block = flops / blocks / (rate * how.share / gpu.multiprocessors)
    moved = element_bytes * batch * length * width * (2 * heads + 2 * kv_heads)
    total: Floats = how.start_ms + 1e3 * (waves * per_block + moved / gpu.bytes_s)
    return total


def convolution_ms(shape: Floats, *, rate: float, element_bytes: float, gpu: Gpu) -> Floats:
    """Forward convolution as blocks of patches, plus its bytes; columns as in docs/gpus.md."""
    batch, channels, filters, width, image, stride, padding = shape.T
    side = np.maximum(1.0, np.floor((image + 2 * padding - width) / stride) + 1)
    patches = batch * side * side
    waves = np.ceil(patches / _PATCHES) * np.ceil(filters / _FILTERS) / gpu.multiprocessors
    idle = np.maximum(1.0, (waves + np.ceil(waves)) / 2) / waves
    flops = 2.0 * patches * filters * channels * width * width
    moved = batch * (channels * image**2 + filters * side**2) + channels * filters * width**2
    total: Floats = 1e3 * (flops * idle / rate + element_bytes * moved / gpu.bytes_s)
    return total
