"""How long a kernel takes on a GPU by its shape: waves of tiles, bytes, the L2 cache.

Every function works on columns of shapes and returns milliseconds of the kernel alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stepscope.predict.other_gpu.gpu import transfer_fit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.predict.other_gpu.gpu import AttentionFit, Gpu, ProductFit, TransferFit

    Floats = NDArray[np.float64]

_SPLITS = (1, 4, 16)  # of the inner dimension, whose parts are added up afterwards
_SPLIT_START_MS = 0.004
_ADDED_BYTES = 4  # parts of a split product are in fp32
_SOFTMAX_BY_WARP = 1024  # columns that one warp holds in registers: the row is read once
_VECTOR_BYTES = 16.0  # that a thread of a softmax reads at once
_NORM_VECTOR = 4  # elements that a thread of a norm reads at once
_CLIFF = 6  # how suddenly rows no longer fit the cache
_LONGER = 4  # of latency and memory nearly the longer one counts
_PATCHES, _FILTERS = 128, 64  # of one block of a convolution
_ALIGNED = 4  # elements of fp32 that one load takes
_NORM_THREADS, _MOST_THREADS = 128, 1024
_NORM_BLOCKS = 8  # of a norm that the registers of a multiprocessor hold


class DtypeRate(NamedTuple):
    """FLOP/s of a dtype: of long products, which the limit of watts slows, and at full clocks."""

    long: float
    full: float
    element_bytes: float = 4


def product_ms(
    shapes: Floats, rate: DtypeRate, gpu: Gpu, how: ProductFit, fit: TransferFit | None = None
) -> Floats:
    """`batch` products of (m, k) by (k, n), on the tile that suits the shape best."""
    batch, m, n, k = shapes.T
    per_multiprocessor = rate.long / gpu.multiprocessors / 1e3
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
    best = best * (rate.long / rate.full) ** (1 - _slowing(n, k, best, how))
    moved = rate.element_bytes * batch * (m * k + n * k + m * n)
    memory = moved / gpu.bytes_s * 1e3
    if how.copies:
        memory = moved_ms(moved, gpu, fit, copies=how.copies)
    total: Floats = (best**how.overlap + memory**how.overlap) ** (1 / how.overlap)
    return total + how.start_cycles / (gpu.row.boost_mhz * 1e3)


def _slowing(n: Floats, k: Floats, long_ms: Floats, how: ProductFit) -> Floats:
    """The part of the slowing by watts that a product has; all of it takes it to `long_ms`."""
    aligned = (n % _ALIGNED == 0) & (k % _ALIGNED == 0)
    power: Floats = np.where(aligned, how.aligned_power, 1.0)
    if not how.calm_ms:
        return power
    return how.calm_power + (power - how.calm_power) * long_ms / (long_ms + how.calm_ms)


def moved_ms(
    moved_bytes: Floats, gpu: Gpu, fit: TransferFit | None = None, *, copies: int = 1
) -> Floats:
    """Each byte read or written once; what stayed in the cache moves at the cache's rate.

    It has to hold as many `copies` as take turns.
    """
    cache = (fit or transfer_fit()).cache
    room = cache.fits * gpu.l2_bytes / np.maximum(copies * moved_bytes, 1.0)
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
    """A softmax or a norm over the columns, one block per row.

    A row is read again: from memory, once the rows in flight no longer fit the cache. Blocks run in
    whole waves, and a short row costs a block its latency rather than its bytes.
    """
    fit = fit or transfer_fit()
    how = fit.rows["softmax" if softmax else "norm"]
    moved = rows * columns * element_bytes
    if softmax:
        by_block = columns > _SOFTMAX_BY_WARP
        again = np.where(by_block, 2.0, 0.0)
        threads, steps = _softmax_block(columns, _VECTOR_BYTES / element_bytes)
        cycles = np.where(by_block, how.start_cycles + how.step_cycles * steps, 0.0)
    else:
        again = np.ones(len(rows))
        threads = np.full(len(rows), float(_NORM_THREADS))
        cycles = how.start_cycles + how.step_cycles * np.ceil(columns / (_NORM_VECTOR * threads))
    resident = np.maximum(1.0, gpu.row.threads / threads)
    at_once = gpu.multiprocessors * (resident if softmax else np.minimum(_NORM_BLOCKS, resident))
    in_flight = np.minimum(rows, at_once) * columns * element_bytes
    filled = in_flight / (how.rereads_fit * gpu.near_l2_bytes)
    missed = filled**_CLIFF / (1 + filled**_CLIFF)
    memory = moved_ms(2 * moved, gpu, fit) + moved * again * missed / gpu.bytes_s * 1e3
    blocks = np.ceil(rows / at_once) * cycles / (gpu.row.boost_mhz * 1e3)
    total: Floats = (memory**_LONGER + blocks**_LONGER) ** (1 / _LONGER)
    return total


def _softmax_block(columns: Floats, vector: float) -> tuple[Floats, Floats]:
    """Threads of a block, and the steps in which they read a row: vectors, then single elements."""
    most = np.minimum(np.floor(columns / vector), _MOST_THREADS)
    threads = np.maximum(32.0, 2.0 ** np.ceil(np.log2(np.maximum(1.0, np.floor(most / 2)))))
    whole = np.floor(columns / (vector * threads))
    rest = columns - whole * vector * threads
    return threads, whole + np.ceil(rest / threads)


def attention_ms(shapes: Floats, rate: DtypeRate, gpu: Gpu, how: AttentionFit) -> Floats:
    """Fused causal attention, forward: a start, then FLOPs.

    Short kernels run at full clocks; the limit of watts slows long ones.
    """
    batch, length, heads, _, width = shapes.T
    flops = 2.0 * batch * heads * length * length * width
    slowed = 1e3 * flops / (rate.long * how.share)
    power = slowed / (slowed + how.calm_ms)
    total: Floats = slowed * (rate.long / rate.full) ** (1 - power)
    return total + how.start_cycles / (gpu.row.boost_mhz * 1e3)


def convolution_ms(shape: Floats, *, rate: float, element_bytes: float, gpu: Gpu) -> Floats:
    """Return the time of forward convolutions: blocks of patches, plus their bytes.

    docs/reference/cli/gpus.md has the columns.
    """
    batch, channels, filters, width, image, stride, padding = shape.T
    side = np.maximum(1.0, np.floor((image + 2 * padding - width) / stride) + 1)
    patches = batch * side * side
    waves = np.ceil(patches / _PATCHES) * np.ceil(filters / _FILTERS) / gpu.multiprocessors
    idle = np.maximum(1.0, (waves + np.ceil(waves)) / 2) / waves
    flops = 2.0 * patches * filters * channels * width * width
    moved = batch * (channels * image**2 + filters * side**2) + channels * filters * width**2
    total: Floats = 1e3 * (flops * idle / rate + element_bytes * moved / gpu.bytes_s)
    return total
