"""The whole run in words: how often steps stall, where wall time went, when the step changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.records.figures import factor, milliseconds, percent, significant, size
from stepscope.records.words import counted
from stepscope.ui.words import ACCOUNT_PARTS, STALLS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepscope.records.whole_run import (
        AccountPart,
        LevelChange,
        MemoryGrowth,
        RankRun,
        RunAccount,
        Stall,
        StepTimes,
    )

VISIBLE = 0.005  # of the wall time
_TRAINING = "training"
# Parts of start-up and of training in the account.
_INNER_PARTS = {
    "launch": "launch",
    "imports": "imports",
    "process_group": "process group",
    "build": "model and the rest",
    "first_batch": "first batch",
    "gc": "garbage collection",
    "compile": "compilation",
    "between_epochs": "between epochs",
    "checkpoint": "checkpoints",
}


def phase_words(phase: str) -> str:
    """A phase of a step, or a part of a part of the account."""
    return _INNER_PARTS.get(phase, phase.replace("_", " "))


def account_words(part: AccountPart) -> str:
    """Name a part: start-up, steady training, stepscope's profiling."""
    known = ACCOUNT_PARTS.get(part.id)
    return known[0].lower() if known else phase_words(part.id)


def account_items(account: RunAccount, without: str = "") -> list[str]:
    """Training, then the other parts that count, the largest first."""
    parts = sorted(account.parts, key=lambda part: (part.id != _TRAINING, -part.share))
    listed = [part for part in parts if part.share >= VISIBLE or part.id == _TRAINING]
    return [f"{account_words(part)} {percent(part.share)}" for part in listed if part.id != without]


def rank_name(run: RankRun) -> str:
    """3, or 3.2 for its second process, as the folders are called."""
    return f"{run.rank}" if run.attempt == 1 else f"{run.rank}.{run.attempt}"


def stall_words(stall: Stall) -> str:
    return STALLS[stall.cause][0].lower()


def stall_time_words(stall: Stall) -> str:
    """What one of them takes; a wait for ranks of other hosts with the clocks' error."""
    if not stall.steps:
        return ""
    words = milliseconds(stall.typical_ms)
    error = stall.wait_error_ms
    return f"{words} (±{milliseconds(error)})" if error else words


def how_often(stall: Stall) -> str:
    """271 steps, every 4; 21 steps; between epochs only."""
    if not stall.steps:
        return "between epochs"
    steps = counted(stall.steps, "step")
    return f"{steps}, every {stall.period:,}" if stall.period else steps


def times_items(times: StepTimes) -> list[str]:
    """The mean step with its interval, then what the mean hides."""
    low, high = significant(times.low_ms), significant(times.high_ms)
    span = "" if low == high else f" ({low} to {high})"
    return [
        f"mean {milliseconds(times.mean_ms)}{span}",
        f"median {milliseconds(times.median_ms)}",
        f"p99 {milliseconds(times.p99_ms)}",
        f"longest {milliseconds(times.longest_ms)}",
    ]


def change_words(change: LevelChange) -> str:
    """step 300: 31.0 -> 62.0 ms (2.0 times)."""
    before, after = significant(change.before_ms), milliseconds(change.after_ms)
    return f"step {change.step:,}: {before} -> {after} ({factor(change.factor)} times)"


def list_changes(changes: Iterable[LevelChange]) -> list[str]:
    return [change_words(change) for change in changes]


def growth_words(growth: MemoryGrowth) -> str:
    sign = "-" if growth.bytes_per_step < 0 else "+"
    return f"{sign}{size(abs(growth.bytes_per_step))} a step"
