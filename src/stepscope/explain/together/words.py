"""Staleness and blocking in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.records.figures import percent, significant
from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.records.together_summary import TogetherSummary

_NAMED = 0.1  # of all blocked time: who causes less is not named


def describe_staleness(summary: TogetherSummary) -> tuple[str, ...]:
    """How far behind reads were; nothing if no read tells."""
    stale = summary.staleness
    if stale.mean is None or stale.largest is None:
        return ()
    behind = f"{significant(stale.mean)} steps behind on average, {stale.largest} at most"
    return (f"reads are {behind} ({counted(stale.pulls, 'pull')})",)


def name_blockers(summary: TogetherSummary) -> tuple[str, ...]:
    """Whom the others wait for, the costliest first."""
    total = sum(pair.blocked_ns for pair in summary.blocks)
    by: dict[int, int] = {}
    for pair in summary.blocks:
        by[pair.by] = by.get(pair.by, 0) + pair.blocked_ns
    ordered = sorted(by.items(), key=lambda item: -item[1])
    named = [
        f"worker {worker} ({percent(ns / total)})" for worker, ns in ordered if ns > _NAMED * total
    ]
    return (f"waited for: {', '.join(named[:4])}",) if named else ()
