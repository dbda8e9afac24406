"""What the passes hold besides what their backward graph accounts for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.records.memory import CapturedMemory

_BEGIN, _FORWARD = "begin", "forward"


def states_bytes(captured: CapturedMemory) -> float:
    """What is there when forward ends, besides activations."""
    for end in captured.phases:
        if end.phase == _FORWARD and end.allocated_bytes is not None:
            return end.allocated_bytes - (end.categories.get("activations") or 0)
    return 0.0


def keeps_gradients(captured: CapturedMemory) -> bool:
    """Whether gradients are there when forward ends."""
    return bool(_gradients_after(captured, _FORWARD))


def old_gradients_bytes(captured: CapturedMemory, *, cleared_late: bool) -> float:
    """Gradients of the step before that forward holds and backward does not.

    A peak in forward shows them. Any other peak does not: then it counts whether the script clears
    them after forward (`cleared_late`).
    """
    left = _gradients_after(captured, _FORWARD)
    peak = captured.peak
    if peak is not None and peak.phase == _FORWARD:
        return max(0.0, (peak.categories.get("gradients") or 0) - left)
    return max(0.0, _gradients_after(captured, _BEGIN) - left) if cleared_late else 0.0


def batches_bytes(captured: CapturedMemory) -> float:
    """Of the batches that are still there when forward ends."""
    other = _other_after_forward(captured)
    return min(captured.batches_bytes, other) if other is not None else captured.batches_bytes


def outputs_bytes(captured: CapturedMemory) -> float:
    """Results that the script holds and backward does not need. They are there when forward ends;
    at the peak they count as temporaries, which the batch and workspaces do not."""
    peak, other = captured.peak, _other_after_forward(captured)
    at_peak = peak.categories.get("other") if peak is not None else None
    return max(0.0, other - at_peak) if other is not None and at_peak is not None else 0.0


def _other_after_forward(captured: CapturedMemory) -> float | None:
    held = {end.phase: end.categories for end in captured.phases}
    return (held.get(_FORWARD) or {}).get("other")


def _gradients_after(captured: CapturedMemory, phase: str) -> float:
    held = {end.phase: end.categories for end in captured.phases}
    return (held.get(phase) or {}).get("gradients") or 0.0
