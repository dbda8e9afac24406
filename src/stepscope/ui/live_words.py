"""A run that goes on in words: progress, memory, ranks. For the terminal and for the live page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.records.figures import (
    factor,
    long_duration,
    milliseconds,
    percent,
    significant,
    size,
)
from stepscope.records.words import counted
from stepscope.ui.run_words import account_items, growth_words, list_changes
from stepscope.ui.words import or_dash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.live_run import LiveRank, LiveRun, VerdictNow
    from stepscope.records.whole_run import Stall

VISIBLE = 0.005  # share of the step
_MOST_CHANGES = 2
_NOTABLE_SPREAD = 1.005  # is printed as 1.01


def progress_items(run: LiveRun, rank: LiveRank) -> list[str]:
    rates = [
        f"{or_dash(rank.recent_steps_per_s, significant)} a second now",
        f"{or_dash(rank.steps_per_s, significant)} on average",
    ]
    return [done_words(run), *rates, *window_items(rank)]


def done_words(run: LiveRun) -> str:
    """400 steps, or 398 to 400 steps where ranks differ."""
    counts = [rank.run.steps for rank in run.ranks]
    fewest, most = min(counts), max(counts)
    done = counted(most, "step")
    return f"{fewest:,} to {done}" if fewest < most else done


def window_items(rank: LiveRank) -> list[str]:
    return [f"{counted(rank.windows, 'window')} recorded"] if rank.windows else []


def matters(stall: Stall) -> bool:
    return stall.share >= VISIBLE or stall.between_epochs_ms > 0


def latest_changes(rank: LiveRank) -> list[str]:
    words = list_changes(rank.run.changes)
    more = len(words) - _MOST_CHANGES
    return [*([f"{more:,} earlier"] if more > 0 else []), *words[-_MOST_CHANGES:]]


def account_so_far(rank: LiveRank) -> list[str]:
    goodput = [f"goodput {percent(rank.goodput)}"] if rank.goodput is not None else []
    account = rank.run.account
    return [*goodput, *(account_items(account, "training") if account else ())]


def memory_items(rank: LiveRank) -> list[str]:
    growth = rank.run.memory_growth
    whose = "" if rank.on_device else "the process has "
    held = f"{whose}{size(rank.memory_bytes or 0)} when the last step ended"
    now = [held] if rank.memory_bytes else []
    return [*now, *([growth_words(growth)] if growth else [])]


def spread_words(run: LiveRun) -> str:
    """How far the mean steps lie apart. Ranks that wait for each other take the same time."""
    if run.spread is None:
        return ""
    timed = [rank for rank in run.by_mean if rank.run.times is not None]
    slowest, fastest = timed[0], timed[-1]
    if slowest.run.times is None or fastest.run.times is None:
        return ""
    if run.spread < _NOTABLE_SPREAD:
        return "a step takes the same time on all ranks"
    return (
        f"rank {slowest.run.rank} takes {milliseconds(slowest.run.times.mean_ms)}, "
        f"{factor(run.spread)} times rank {fastest.run.rank}"
    )


def attempt_words(earlier: Sequence[LiveRank]) -> list[str]:
    """One sentence for each attempt that has ended, in the order of time."""
    rows = []
    for attempt in sorted({rank.run.attempt for rank in earlier}):
        ranks = [rank for rank in earlier if rank.run.attempt == attempt]
        steps = max(rank.run.steps for rank in ranks)
        seconds = max(rank.seconds for rank in ranks)
        means = [rank.run.times.mean_ms for rank in ranks if rank.run.times]
        pace = f", {milliseconds(max(means))} a step" if means else ""
        took = long_duration(1e9 * seconds)
        rows.append(f"{attempt} ended after {counted(steps, 'step')} in {took}{pace}")
    return rows


def samples_per_s(run: LiveRun, verdict: VerdictNow | None) -> float | None:
    """Of all ranks together; known once a window has shown the batch."""
    if verdict is None or verdict.batch is None:
        return None
    rates = [rank.recent_steps_per_s for rank in run.ranks]
    return verdict.batch * sum(rate or 0.0 for rate in rates) if any(rates) else None
