"""memory.json of a run folder as the account of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.memory.batch import line_of
from stepscope.explain.memory.growth import growth_of
from stepscope.records.memory import (
    CATEGORIES,
    Fragmentation,
    Memory,
    ModuleBytes,
    Moment,
)

if TYPE_CHECKING:
    from stepscope.records.memory import BatchLine, CapturedMemory, Categories, Growth

_PHASES = ("forward", "backward", "optimizer")


def is_account(captured: CapturedMemory) -> bool:
    """Whether it tells what a step needs, and of which device."""
    peak = captured.peak
    known = peak is not None and (peak.allocated_bytes or any(peak.categories.values()))
    return captured.device is not None and bool(known)


def memory_of_capture(captured: CapturedMemory) -> Memory:
    """As measured, of what `is_account`; theory and the largest batch come later."""
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
            ModuleBytes(module=each.module, size_bytes=each.bytes, tensors=each.tensors)
            for each in captured.activations_by_module
        ),
        fragmentation=fragmentation_of(allocated, peak.reserved_bytes),
        growth=_growth(captured),
        notes=tuple(captured.notes),
    )


def _peak_bytes(categories: Categories, allocated: int | None) -> int:
    """What the allocator held. Categories that are all known may hold more, from elsewhere."""
    held = sum(size or 0 for size in categories.values())
    if allocated is None or (held > allocated and None not in categories.values()):
        return held
    return allocated


def capture_lines(captured: CapturedMemory, cast_bytes: int) -> tuple[BatchLine, ...]:
    """The peak and every phase's end against the batch."""
    inputs = captured.inputs_bytes or 0
    peak = captured.peak
    assert peak is not None
    lines = [
        line_of(
            "peak",
            peak.categories,
            inputs_bytes=inputs,
            cast_bytes=cast_bytes,
            in_optimizer=peak.phase == "optimizer",
        )
    ]
    lines += [
        line_of(f"after {each.phase}", each.categories, inputs_bytes=inputs, cast_bytes=cast_bytes)
        for each in captured.phases
        if each.phase != "begin"
    ]
    return tuple(lines)


def ordered(categories: Categories) -> Categories:
    """All categories, in their order; what is not there is not known."""
    return {name: categories.get(name) for name in CATEGORIES}


def fragmentation_of(allocated: int | None, reserved: int | None) -> Fragmentation | None:
    """At the peak; None where the allocator kept no account."""
    if not allocated or not reserved:
        return None
    return Fragmentation(
        at="peak",
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        share=min(1.0, max(0.0, 1 - allocated / reserved)),
    )


def _moments(captured: CapturedMemory) -> tuple[Moment, ...]:
    """In order of time; the peak stands before the end of the phase it is in."""
    peak = captured.peak
    assert peak is not None
    top = Moment(
        name="peak",
        categories=ordered(peak.categories),
        allocated_bytes=peak.allocated_bytes,
        reserved_bytes=peak.reserved_bytes,
    )
    out = []
    for each in captured.phases:
        if each.phase == peak.phase and peak.allocated_bytes is not None:
            out.append(top)
        out.append(
            Moment(
                name="before the step" if each.phase == "begin" else f"after {each.phase}",
                categories=ordered(each.categories),
                allocated_bytes=each.allocated_bytes,
                reserved_bytes=each.reserved_bytes,
            )
        )
    return tuple(out)


def _growth(captured: CapturedMemory) -> Growth | None:
    """One step: right after an optimizer step, and right after the next."""
    held = {each.phase: each.allocated_bytes for each in captured.phases}
    before, after = held.get("begin"), held.get("optimizer")
    if before is None or after is None:
        return None
    return growth_of("capture", (before, after))
