"""Memory of one step from memory.json of a run folder, as a straight line against batch
size, and what still fits.
"""

from __future__ import annotations

import math

from stepscope.errors import NotCapturedError
from stepscope.explain.memory.lifetimes import growth_of
from stepscope.records.memory import (
    CATEGORIES,
    STATES,
    BatchLine,
    CapturedMemory,
    CapturedPeak,
    CapturedPhase,
    Categories,
    Fragmentation,
    Growth,
    LargestBatch,
    LimitFrom,
    Memory,
    ModuleBytes,
    Moment,
    PoolBytes,
)

# Parameters, gradients, optimizer state, buffers and casts of weights are fixed; activations,
# temporaries of forward and backward, and the batch itself grow with the batch size. Another moment
# may be highest at another batch size, so the peak is the highest line. The range covers what one
# measurement cannot separate: some temporaries may be workspace of fixed size, and some other
# memory may be outputs that grow.

# The share of temporaries that may be workspace, and of scaling memory that rounding may change.
UNSURE_TEMPORARIES = 0.15
UNSURE_SCALING = 0.01
# Of what grows: with more of it in pools of unknown content, no batch is promised.
MOST_IN_POOLS = 0.5
# Driver and libraries take some of a device's memory (787 MB on an H200 with torch 2.11).
CONTEXT_BYTES = 800_000_000
# The allocator's segments hold back a share of any limit: the measured share, within these bounds
# (the allocator releases what it can when memory runs out). At other batch sizes up to
# MORE_SEGMENTS times the measured share was seen.
SEGMENTS_SHARE = 0.02
MOST_SEGMENTS_SHARE, MOST_LOW_SHARE = 0.12, 0.3
LOW_SEGMENTS_SHARE = 0.08
MORE_SEGMENTS = 2.5
_MOST_SAMPLES = 2**40
UNKNOWN_POOLS = (
    "how memory grows with the batch is not known: most of it is inside CUDA graphs, whose pools "
    "do not show what they hold (record the step once without graphs)"
)


def batch_line(
    moment: str,
    categories: Categories,
    *,
    inputs_bytes: int = 0,
    prepared_bytes: int = 0,
    cast_bytes: int = 0,
    pools_bytes: int = 0,
    in_optimizer: bool = False,
    other_scales: bool = False,
) -> BatchLine:
    """Divide one moment's bytes. `other_scales`: the other bytes came with this batch.

    `prepared_bytes` are of other batches that the script holds. They grow if there are as many of
    them, and stay if the samples are the same: `inputs_bytes` and they are then divided otherwise.
    `pools_bytes` of the temporaries are kept by CUDA graphs at every moment: mostly what a pass
    needs for its batch, but any part of them may be fixed.
    """
    held = {name: size or 0 for name, size in categories.items()}
    states = sum(held.get(name, 0) for name in STATES)
    temporaries, other = held.get("temporaries", 0), held.get("other", 0)
    activations = held.get("activations", 0)
    cast = min(cast_bytes, activations)
    batches = inputs_bytes + prepared_bytes
    inputs = other if other_scales else min(batches, other)
    pools = min(pools_bytes, temporaries)
    temporaries -= pools
    fixed = states + cast + other - inputs
    scaling = activations - cast + inputs + pools
    unsure = float(pools) + (inputs if prepared_bytes and not other_scales else 0.0)
    if in_optimizer:
        fixed += temporaries
    else:
        scaling += temporaries
        unsure += UNSURE_TEMPORARIES * temporaries
    margin = round(UNSURE_SCALING * scaling)
    return BatchLine(
        moment=moment,
        fixed_bytes=fixed,
        scaling_bytes=scaling,
        maybe_fixed_bytes=min(scaling, round(unsure) + margin),
        maybe_scaling_bytes=min(fixed, other - inputs + margin),
    )


def is_known_to_grow(lines: tuple[BatchLine, ...], pools_bytes: int) -> bool:
    """Whether it is known what grows with the batch, and not only that CUDA graphs hold it."""
    growing = max((line.scaling_bytes for line in lines), default=0)
    return growing > 0 and pools_bytes <= MOST_IN_POOLS * growing


def predict_peak(memory: Memory, batch_factor: float) -> tuple[int, int, int]:
    """Peak bytes, lowest and highest, at `batch_factor` times the measured batch."""
    if memory.largest_batch is None and memory.pools:
        raise NotCapturedError(UNKNOWN_POOLS)
    if memory.largest_batch is None:
        raise NotCapturedError(
            "memory by category was not captured: record with `stepscope run`, or with "
            "profile_memory=True"
        )
    return peak_at(memory.largest_batch.lines, batch_factor)


def peak_at(lines: tuple[BatchLine, ...], factor: float) -> tuple[int, int, int]:
    """The highest line, and its range with the least and the most that may scale."""
    middle = max(_bytes_at(line, factor) for line in lines)
    flattest = max(_bytes_at(line, factor, -line.maybe_fixed_bytes) for line in lines)
    steepest = max(_bytes_at(line, factor, line.maybe_scaling_bytes) for line in lines)
    peaks = (middle, flattest, steepest)
    return round(middle), math.floor(min(peaks)), math.ceil(max(peaks))


def _bytes_at(line: BatchLine, factor: float, shift: int = 0) -> float:
    """With `shift` bytes scaling that are counted as fixed."""
    return line.fixed_bytes - shift + (line.scaling_bytes + shift) * factor


def find_largest(
    lines: tuple[BatchLine, ...],
    *,
    batch: int | None,
    batch_from: str | None,
    batches_per_step: int | None = 1,
    limit_bytes: int | None,
    limit_from: LimitFrom | None,
    held_back: float = 0.0,
) -> LargestBatch:
    """The largest batch that fits under the limit, and how sure that is.

    `held_back`: the share of reserved memory that was not allocated at the peak.
    """
    factors: tuple[float | None, float | None, float | None] = (None, None, None)
    reserve = 0
    if limit_bytes is not None:
        context = CONTEXT_BYTES if limit_from == "device" else 0
        room = max(0, limit_bytes - context)
        share = min(MOST_SEGMENTS_SHARE, max(SEGMENTS_SHARE, held_back))
        low_share = min(MOST_LOW_SHARE, max(LOW_SEGMENTS_SHARE, MORE_SEGMENTS * held_back))
        reserve = context + round(share * room)
        factors = (
            _fits(lines, room * (1 - share), moved=0),
            _fits(lines, room * (1 - low_share), moved=1),
            _fits(lines, room, moved=-1),
        )
    steepest = max(line.scaling_bytes for line in lines)
    largest, low, high = (_samples(batch, factor) for factor in factors)
    return LargestBatch(
        lines=lines,
        batch=batch,
        batch_from=batch_from,
        batches_per_step=batches_per_step,
        per_sample_bytes=round(steepest / batch) if batch else None,
        limit_bytes=limit_bytes,
        limit_from=limit_from,
        reserve_bytes=reserve,
        factor=factors[0],
        factor_low=factors[1],
        factor_high=factors[2],
        largest=largest,
        low=low,
        high=high,
    )


def _fits(lines: tuple[BatchLine, ...], room: float, *, moved: int) -> float | None:
    """The batch factor at which the first line reaches the room; None if none ever does.

    `moved`: with 1 everything that may scale scales, with -1 everything that may be fixed is fixed.
    Above the present batch the steepest lines are the cautious ones, below it the flattest: the
    worse of both counts.
    """
    factors = []
    for line in lines:
        shifts = (line.maybe_scaling_bytes, -line.maybe_fixed_bytes) if moved else (0,)
        ends = []
        for shift in shifts:
            scaling = line.scaling_bytes + shift
            left = room - (line.fixed_bytes - shift)
            ends.append(max(0.0, left / scaling) if scaling > 0 else (math.inf if left >= 0 else 0))
        factors.append(max(ends) if moved < 0 else min(ends))
    least = min(factors)
    return least if math.isfinite(least) else None


def _samples(batch: int | None, factor: float | None) -> int | None:
    if batch is None or factor is None:
        return None
    return min(_MOST_SAMPLES, math.floor(batch * factor + 1e-9))


# memory.json of a run folder as the account of one step.


def is_account(captured: CapturedMemory) -> bool:
    """Whether it says what a step needs, and on which device."""
    peak = captured.peak
    known = peak is not None and (peak.allocated_bytes or any(peak.categories.values()))
    return captured.device is not None and bool(known)


def memory_of_capture(captured: CapturedMemory) -> Memory:
    """As measured; `is_account` must hold. Theory and the largest batch are added later."""
    peak = captured.peak
    assert peak is not None
    assert captured.device is not None
    categories = ordered(peak.categories)
    allocated = peak.allocated_bytes
    # What the allocator held, or the sum of all known categories if that is more.
    held = sum(size or 0 for size in categories.values())
    if allocated is None or (held > allocated and None not in categories.values()):
        peak_bytes = held
    else:
        peak_bytes = allocated
    # In order of time; the peak comes before the end of its phase.
    assert peak is not None
    moments = []
    for phase in captured.phases:
        if phase.phase == peak.phase and peak.allocated_bytes is not None:
            moments.append(_moment("peak", peak))
        begins = phase.phase == "begin"
        moments.append(_moment("before the step" if begins else f"after {phase.phase}", phase))
    return Memory(
        source="capture",
        device=captured.device,
        peak_bytes=peak_bytes,
        reserved_bytes=peak.reserved_bytes,
        phase=peak.phase,
        measured=peak.measured,
        categories=categories,
        moments=tuple(moments),
        by_module=tuple(
            ModuleBytes(module=module.module, size_bytes=module.bytes, tensors=module.tensors)
            for module in captured.activations_by_module
        ),
        pools=tuple(PoolBytes(pool=row.pool, size_bytes=row.bytes) for row in captured.pools),
        fragmentation=fragmentation_of(allocated, peak.reserved_bytes),
        growth=_growth(captured),
        notes=tuple(captured.notes),
    )


def capture_lines(captured: CapturedMemory, cast_bytes: int) -> tuple[BatchLine, ...]:
    """The peak, the moment with most of what grows, and every phase's end against the batch."""
    peak, growing = captured.peak, captured.growing
    assert peak is not None
    moments = [("peak", peak.categories, peak.phase == "optimizer")]
    if growing is not None:
        moments.append((f"in {growing.phase}", growing.categories, growing.phase == "optimizer"))
    moments += [
        (f"after {phase.phase}", phase.categories, False)
        for phase in captured.phases
        if phase.phase != "begin"
    ]
    return tuple(
        batch_line(
            name,
            held,
            inputs_bytes=captured.inputs_bytes or 0,
            prepared_bytes=captured.prepared_bytes or 0,
            cast_bytes=cast_bytes,
            pools_bytes=captured.pools_unknown_bytes or 0,
            in_optimizer=stepping,
        )
        for name, held, stepping in moments
    )


def ordered(categories: Categories) -> Categories:
    """All categories in their order; a missing one is unknown."""
    return {name: categories.get(name) for name in CATEGORIES}


def fragmentation_of(allocated: int | None, reserved: int | None) -> Fragmentation | None:
    """At the peak; None if the allocator kept no account."""
    if not allocated or not reserved:
        return None
    return Fragmentation(
        at="peak",
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        share=min(1.0, max(0.0, 1 - allocated / reserved)),
    )


def _moment(name: str, at: CapturedPeak | CapturedPhase) -> Moment:
    return Moment(
        name=name,
        categories=ordered(at.categories),
        allocated_bytes=at.allocated_bytes,
        reserved_bytes=at.reserved_bytes,
    )


def _growth(captured: CapturedMemory) -> Growth | None:
    """One step: right after an optimizer step, and right after the next."""
    held = {phase.phase: phase.allocated_bytes for phase in captured.phases}
    before, after = held.get("begin"), held.get("optimizer")
    if before is None or after is None:
        return None
    return growth_of("capture", (before, after))
