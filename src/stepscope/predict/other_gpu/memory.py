"""Whether a step fits into another GPU's memory, and the batch that does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from stepscope.explain.memory.batch import CONTEXT_BYTES, SEGMENTS_SHARE, find_largest
from stepscope.predict.peaks import peak_at_batch
from stepscope.records.figures import significant, size

if TYPE_CHECKING:
    from stepscope.predict.other_gpu.gpu import Gpu
    from stepscope.predict.step_context import StepContext

_HALVINGS = 30


class MemoryFit(msgspec.Struct, frozen=True, kw_only=True):
    fits: bool | None  # None: the peak is not known
    peak_bytes: int | None
    limit_bytes: int  # what is left for tensors
    batch: int | None = None  # the largest that fits, if the batch is known
    factor: float | None = None  # the same over the present batch


def check_memory(context: StepContext, gpu: Gpu) -> MemoryFit:
    limit = round((gpu.memory_bytes - CONTEXT_BYTES) * (1 - SEGMENTS_SHARE))
    peak = _peak_bytes(context, 1.0)
    if peak is None:
        return MemoryFit(fits=None, peak_bytes=None, limit_bytes=limit)
    factor = _largest_factor(context, gpu, limit)
    batch = math.floor(context.batch * factor + 1e-9) if context.batch and factor else None
    return MemoryFit(
        fits=peak <= limit, peak_bytes=peak, limit_bytes=limit, batch=batch, factor=factor
    )


def describe_memory(context: StepContext, gpu: Gpu) -> tuple[str, ...]:
    """Whether it fits, as a sentence; nothing if the peak is not known."""
    memory = check_memory(context, gpu)
    if memory.peak_bytes is None:
        return ("peak memory was not captured, so it is unknown whether the step fits",)
    if memory.fits:
        return (f"its peak of {size(memory.peak_bytes)} fits into {size(gpu.memory_bytes)}",)
    return (
        f"it does not fit. Its peak of {size(memory.peak_bytes)} is more than the "
        f"{size(memory.limit_bytes)} that {gpu.name} leaves for tensors. {_what_fits(memory)}",
    )


def _what_fits(memory: MemoryFit) -> str:
    if memory.batch:
        return f"A batch of {memory.batch} would fit"
    if memory.factor:
        return f"{significant(memory.factor)} of the batch would fit"
    return "No batch is known to fit"


def _peak_bytes(context: StepContext, factor: float) -> int | None:
    if context.memory is not None and factor == 1.0:
        return context.memory.peak_bytes
    peak = peak_at_batch(context, factor)
    return peak.size_bytes if peak else None


def _largest_factor(context: StepContext, gpu: Gpu, limit: int) -> float | None:
    if context.memory is not None and context.memory.largest_batch is not None:
        largest = find_largest(
            context.memory.largest_batch.lines,
            batch=None,
            batch_from=None,
            limit_bytes=round(gpu.memory_bytes),
            limit_from="device",
        )
        return largest.factor
    return _search_factor(context, limit)


def _search_factor(context: StepContext, limit: int) -> float | None:
    """Peaks grow with the batch: halve the range that holds the largest one that fits."""
    low, high = 1 / 1024, 1024.0
    least = _peak_bytes(context, low)
    if least is None or least > limit:
        return None
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        peak = _peak_bytes(context, middle)
        low, high = (middle, high) if peak is not None and peak <= limit else (low, middle)
    return low
