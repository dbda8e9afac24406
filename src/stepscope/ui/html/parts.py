"""The parts of a step as the page shows them: words of `ui.words`, colours of the style sheet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.ui.words import PARTS

if TYPE_CHECKING:
    from stepscope.records.explanation import Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSlice:
    """One part of a step; `color` names a CSS variable."""

    label: str
    color: str
    idle: bool
    hint: str
    stall: bool = False
    ms: float = 0.0
    share: float = 0.0


_COLORS = {"exposed_comm": "comm", "exposed_memory": "memory"}


def slices(budget: Budget) -> list[BudgetSlice]:
    """The budget's parts that took any time."""
    return [slice_of(part.id, part.ms, part.share) for part in budget.parts if part.ms > 0]


def gap_labels() -> dict[str, str]:
    """Label of each idle cause, for the timeline's tooltips."""
    return {_key(name): label for name, (label, idle, _) in PARTS.items() if idle}


def slice_of(part_id: str, ms: float = 0.0, share: float = 0.0) -> BudgetSlice:
    """How one part looks, however long it took."""
    key = _key(part_id)
    label, idle, hint = PARTS[part_id]
    return BudgetSlice(
        label=label,
        color=_COLORS.get(key, key),
        idle=idle,
        hint=hint,
        stall=part_id.startswith("stall_"),
        ms=ms,
        share=max(share, 0.0),
    )


def _key(part_id: str) -> str:
    """Parts and causes of gaps share colours; only the part's id says that it is idle time."""
    return part_id.removeprefix("idle_")
