"""One kernel's time on another GPU, from its time on this one and a model of kernels' times by
their shapes: waves of tiles, bytes, the L2 cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from stepscope.errors import UsageError
from stepscope.predict.fitted import fitted
from stepscope.predict.other_gpu.gpu import (
    AttentionFit,
    Gpu,
    GpuRow,
    ProductFit,
    TransferFit,
    closeness,
    find_gpu,
    process_name,
    transfer_fit,
    unit_of,
)
from stepscope.records.dtypes import PEAK_BYTES
from stepscope.records.normal import NORMAL_90

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    KernelModel = Callable[[Floats, str, Gpu, TransferFit], Floats]

CONFIDENCE = NORMAL_90  # of the standard deviation: nine of ten times lie inside
KERNEL_FLOOR_MS = 0.002  # no kernel is shorter
_TWO_INPUTS = frozenset({"add", "mul", "div", "pow"})
_ONE_INPUT = frozenset({"addu", "mulu", "divu", "powu", "relu", "gelu", "tanh", "embedding"})
# Each of these reads or writes this many tensors.
_TENSORS = dict.fromkeys(_TWO_INPUTS, 3.0) | dict.fromkeys(_ONE_INPUT, 2.0)
_TENSORS |= {"silu_mul": 3.0, "rope": 2.0}
_CONVOLUTION_POWER = fitted("kernels.convolution_power")  # they draw less power than products
_ONE_TILE = frozenset({"ampere", "ada", "hopper", "blackwell"})
_LAUNCH_SPREAD = fitted("doubts.launch")  # of hosts' launch times
# A model's share of the source's time is trusted down to this: the rest may be the host's.
_LEAST_KERNEL = 0.8


class ModelledOperator(NamedTuple):
    """How one kind of operator is modelled."""

    family: str
    columns: int  # of its shape
    model: KernelModel

    def family_in(self, dtype: str) -> str:
        """Products on tensor cores are a family of their own."""
        return "tensor" if self.columns == 4 and unit_of(dtype) == "tensor" else self.family


def retime(
    *,
    op: str,
    shape: Sequence[float],
    dtype: str,
    ms: float,
    source: str | Gpu,
    target: str | Gpu,
    launch_ms: float | None = None,
) -> tuple[float, float, float]:
    """Milliseconds on `target`, with low and high: nine of ten times lie between them.

    `launch_ms` is the host's time inside `ms`; a kernel's own time, as profilers record it, has
    none. By default fp32 times hold as much as times taken with events do. Names of operators and
    GPUs are those of docs/reference/cli/gpus.md; shapes are (batch, m, n, k) for matmuls and
    (rows, columns) for elementwise operators.
    """
    if not ms > 0 or not math.isfinite(ms):
        raise UsageError(f"retime: ms={ms!r} is not a time: give milliseconds above 0")
    known = find_operator(op)
    if len(shape) != known.columns:
        raise UsageError(f"retime: {op} needs a shape of {known.columns} numbers, not {shape!r}")
    sides = shape[:-1] if op == "conv" else shape  # a convolution's padding may be 0
    if not all(math.isfinite(side) and side > 0 for side in sides):
        raise UsageError(f"retime: {shape!r} is not a shape of {op}. Give sides above 0")
    before, after = (find_gpu(gpu) if isinstance(gpu, str) else gpu for gpu in (source, target))
    for gpu in (before, after):
        if dtype not in gpu.rates:
            raise UsageError(f"retime: no {dtype} rate is known for {gpu.name}")
    if before == after:
        return ms, ms, ms
    fit, alone = transfer_fit(), launch_ms is None
    if launch_ms is None:
        launch_ms = fit.launch_ms.get(known.family, 0.0) if dtype == "fp32" else 0.0
    time = retime_many(
        known,
        np.array([shape], np.float64),
        dtype,
        np.array([ms], np.float64),
        before,
        after,
        launch_ms=launch_ms,
        alone=alone or launch_ms > 0,
    )
    predicted = float(time[0])
    doubt = kernel_doubt(known.family_in(dtype), dtype, before, after)
    half = CONFIDENCE * math.hypot(doubt, float(launch_doubt(launch_ms, time)[0]))
    return predicted, predicted * math.exp(-half), predicted * math.exp(half)


def retime_many(
    known: ModelledOperator,
    shapes: Floats,
    dtype: str,
    ms: Floats,
    source: Gpu,
    target: Gpu,
    *,
    launch_ms: float = 0.0,
    source_launch_ms: float | None = None,
    alone: bool = False,
    fit: TransferFit | None = None,
) -> Floats:
    """Times on the target. A kernel keeps part of how far it is from the model on the source.

    `alone` kernels were timed by themselves, again and again; others are a step's.
    """
    fit = fit or transfer_fit()
    if not alone:
        fit = inside_step(fit)
    before = known.model(shapes, dtype, source, fit)
    after = known.model(shapes, dtype, target, fit)
    own = fit.hidden_launch * (launch_ms if source_launch_ms is None else source_launch_ms)
    host = np.clip(ms - _LEAST_KERNEL * before, 0.0, own)
    # A kernel shorter than its host's launch leaves at least a little time for itself.
    deviation = np.maximum(ms - host, KERNEL_FLOOR_MS) / np.maximum(before, KERNEL_FLOOR_MS)
    kept = fit.kept[known.family_in(dtype)][closeness(source.row, target.row)]
    kernel = np.maximum(after, KERNEL_FLOOR_MS) * deviation**kept
    if not launch_ms:
        return np.asarray(kernel, np.float64)
    # Times without the host's share, such as a profiler's, show none on the target either.
    held = np.minimum(1.0, host / own)
    return np.asarray(
        np.maximum(launch_ms * held, fit.hidden_launch * launch_ms * held + kernel), np.float64
    )


def inside_step(fit: TransferFit) -> TransferFit:
    """For kernels of a step: it has brought the clocks down before, and used the cache."""
    products = {kind: replace(how, calm_ms=0.0, copies=0) for kind, how in fit.products.items()}
    return replace(fit, products=products)


def kernel_doubt(family: str, dtype: str, source: Gpu, target: Gpu) -> float:
    """Standard deviation of the logarithm of one predicted time."""
    fit = transfer_fit()
    close = closeness(source.row, target.row)
    spread = fit.spread[family][close]
    if target.calibrated:
        return spread / 2
    if close != "chip" and f"{process_name(target.row)} {unit_of(dtype)}" in fit.power.estimated:
        spread = math.hypot(spread, fit.estimated)
    return spread


def launch_doubt(launch_ms: float, predicted_ms: Floats) -> Floats:
    """For the part of a time that another host's launch may be."""
    doubt: Floats = _LAUNCH_SPREAD * np.minimum(1.0, launch_ms / predicted_ms)
    return doubt


def find_operator(op: str) -> ModelledOperator:
    operators = _operators()
    if op in operators:
        return operators[op]
    from difflib import get_close_matches

    near = get_close_matches(op, list(operators), 3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(f"retime: there is no operator {op!r}. {hint}Known are {', '.join(operators)}")


@cache
def _operators() -> dict[str, ModelledOperator]:
    operators = {
        "linear": ModelledOperator("linear", 4, partial(_product, is_batched=False)),
        "bmm": ModelledOperator("bmm", 4, partial(_product, is_batched=True)),
        "softmax": ModelledOperator("softmax", 2, partial(_rows, softmax=True)),
        "ln": ModelledOperator("norm", 2, partial(_rows, softmax=False)),
        "norm": ModelledOperator("norm", 2, partial(_rows, softmax=False)),
        "conv": ModelledOperator("conv", 7, _convolution),
        "attention": ModelledOperator("attention", 5, _attention),
    }
    for op, tensors in _TENSORS.items():
        operators[op] = ModelledOperator("elementwise", 2, partial(_moving, tensors=tensors))
    return operators


def bmm_kind(row: GpuRow) -> str:
    """Since Ampere, NVIDIA's library runs batched fp32 products on one size of tile."""
    return "bmm" if row.generation in _ONE_TILE else "bmm before ampere"


def _product(shapes: Floats, dtype: str, gpu: Gpu, fit: TransferFit, *, is_batched: bool) -> Floats:
    kind = bmm_kind(gpu.row) if is_batched else "linear"
    how = fit.products[kind if unit_of(dtype) == "fp32" else "tensor"]
    return product_ms(shapes, _rate(dtype, gpu), gpu, how, fit)


def _rate(dtype: str, gpu: Gpu) -> DtypeRate:
    return DtypeRate(gpu.rates[dtype], gpu.full_rate(dtype), PEAK_BYTES[dtype])


def _convolution(shapes: Floats, dtype: str, gpu: Gpu, _fit: TransferFit) -> Floats:
    rate, size = gpu.slowed_rate(dtype, _CONVOLUTION_POWER), PEAK_BYTES[dtype]
    return convolution_ms(shapes, rate=rate, element_bytes=size, gpu=gpu)


def _attention(shapes: Floats, dtype: str, gpu: Gpu, fit: TransferFit) -> Floats:
    return attention_ms(shapes, _rate(dtype, gpu), gpu, fit.attention)


def _rows(shapes: Floats, dtype: str, gpu: Gpu, fit: TransferFit, *, softmax: bool) -> Floats:
    size = PEAK_BYTES[dtype]
    return rows_ms(*shapes.T, element_bytes=size, softmax=softmax, gpu=gpu, fit=fit)


def _moving(shapes: Floats, dtype: str, gpu: Gpu, fit: TransferFit, *, tensors: float) -> Floats:
    return moved_ms(shapes[:, 0] * shapes[:, 1] * PEAK_BYTES[dtype] * tensors, gpu, fit)


# How long a kernel takes on a GPU by its shape. Every function works on columns of shapes and
# returns milliseconds of the kernel alone.

_SPLITS = (1, 4, 16)  # of the inner dimension, whose parts are added up afterwards
_SPLIT_START_MS = fitted("kernels.split_start_ms")
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
