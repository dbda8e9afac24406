"""memory.json of a run folder as the account of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.memory.batch import batch_line
from stepscope.explain.memory.growth import growth_of
from stepscope.records.memory import (
    CATEGORIES,
    Fragmentation,
    Memory,
    ModuleBytes,
    Moment,
    PoolBytes,
)

if TYPE_CHECKING:
    from stepscope.records.memory import (
        BatchLine,
        CapturedMemory,
        CapturedPeak,
        CapturedPhase,
        Categories,
        Growth,
    )


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
    return Memory(
        source="capture",
        device=captured.device,
        peak_bytes=_peak_bytes(categories, allocated),
        reserved_bytes=peak.reserved_bytes,
        phase=peak.phase,
        measured=peak.measured,
        categories=categories,
        moments=_moments(captured),
        by_module=tuple(
            ModuleBytes(module=module.module, size_bytes=module.bytes, tensors=module.tensors)
            for module in captured.activations_by_module
        ),
        pools=tuple(PoolBytes(pool=row.pool, size_bytes=row.bytes) for row in captured.pools),
        fragmentation=fragmentation_of(allocated, peak.reserved_bytes),
        growth=_growth(captured),
        notes=tuple(captured.notes),
    )


def _peak_bytes(categories: Categories, allocated: int | None) -> int:
    """What the allocator held, or the sum of all known categories if that is more."""
    held = sum(size or 0 for size in categories.values())
    if allocated is None or (held > allocated and None not in categories.values()):
        return held
    return allocated


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


def _moments(captured: CapturedMemory) -> tuple[Moment, ...]:
    """In order of time; the peak comes before the end of its phase."""
    peak = captured.peak
    assert peak is not None
    moments = []
    for phase in captured.phases:
        if phase.phase == peak.phase and peak.allocated_bytes is not None:
            moments.append(_moment("peak", peak))
        begins = phase.phase == "begin"
        moments.append(_moment("before the step" if begins else f"after {phase.phase}", phase))
    return tuple(moments)


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
