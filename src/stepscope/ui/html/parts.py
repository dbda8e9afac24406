"""The words and colours for the slices of a step, the same in bar, legend, timeline and tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.records.explanation import Budget, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One slice as the page shows it; `color` names a CSS variable."""

    label: str
    color: str
    idle: bool
    hint: str
    ms: float = 0.0
    share: float = 0.0


_SLICES = {
    "compute": ("Compute", False, "Kernels were running on the device."),
    "exposed_comm": ("Communication", False, "Collectives with no compute to hide behind."),
    "exposed_memory": ("Copies", False, "Copies and memsets with nothing else running."),
    "host": ("Waiting for host", True, "The device was idle: nothing had been launched yet."),
    "data_loading": ("Data loading", True, "Idle while the host waited for the next batch."),
    "sync": ("Blocking sync", True, "Idle after a call that made the host wait for the device."),
    "operators": ("Operator dispatch", True, "Idle while the host prepared operators to launch."),
    "python": ("Python", True, "Idle while the host ran Python between operators."),
    "profiler": ("Profiler overhead", True, "Idle caused by recording itself; gone without it."),
    "launch": ("Launch latency", True, "Queued work was on its way to the device."),
    "other": ("Other idle", True, "Idle with work queued: dependencies or other streams."),
}
_COLORS = {"exposed_comm": "comm", "exposed_memory": "memory"}


def slices(budget: Budget) -> list[Slice]:
    """The budget's parts that took any time, in the order given."""
    return [_slice(part) for part in budget.parts if part.ms > 0]


def gap_labels() -> dict[str, str]:
    """Label of each idle cause, for the timeline's tooltips."""
    return {name: label for name, (label, idle, _) in _SLICES.items() if idle}


def _slice(part: Part) -> Slice:
    key = part.id.removeprefix("idle_")
    fallback = (key.replace("_", " ").capitalize(), part.id.startswith("idle"), "")
    label, idle, hint = _SLICES.get(key, fallback)
    color = _COLORS.get(key, key) if key in _SLICES else "other"
    return Slice(
        label=label, color=color, idle=idle, hint=hint, ms=part.ms, share=max(part.share, 0.0)
    )
