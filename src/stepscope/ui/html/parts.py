"""The parts of a step as the page shows them: words of `ui.words`, colours of the style sheet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.ui.words import PARTS

if TYPE_CHECKING:
    from stepscope.records.explanation import Budget, Part


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
    return [_slice(part) for part in budget.parts if part.ms > 0]


def gap_labels() -> dict[str, str]:
    """Label of each idle cause, for the timeline's tooltips."""
    return {_key(name): label for name, (label, idle, _) in PARTS.items() if idle}


def _slice(part: Part) -> BudgetSlice:
    key = _key(part.id)
    label, idle, hint = PARTS[part.id]
    return BudgetSlice(
        label=label,
        color=_COLORS.get(key, key),
        idle=idle,
        hint=hint,
        stall=part.id.startswith("stall_"),
        ms=part.ms,
        share=max(part.share, 0.0),
    )


def _key(part_id: str) -> str:
    """Parts and causes of gaps share colours; only the part's id says that it is idle time."""
    return part_id.removeprefix("idle_")
