"""A bench against saved results, in sentences for every surface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.bench.against import moved_part
from stepscope.records.figures import (
    milliseconds,
    relative_change,
    relative_interval,
    signed,
    unsigned_percent,
)
from stepscope.records.words import counted
from stepscope.ui.answer import Answer
from stepscope.ui.bench.words import row_name
from stepscope.ui.words import PARTS

if TYPE_CHECKING:
    from stepscope.records.bench_comparison import BenchComparison, ChangeVerdict, WorkloadChange


def against_answer(comparison: BenchComparison) -> Answer:
    return Answer(verdict=_verdict(comparison), why=_why(comparison), next=_next(comparison))


def against_notes(comparison: BenchComparison) -> list[str]:
    """What to know before the verdict is believed."""
    rows = comparison.workloads
    unlike = [f"{row_name(row)} is not comparable: {row.why}" for row in rows if row.why]
    own = [f"{row_name(row)}: {note}" for row in rows for note in row.notes]
    skipped = f"in the base and not run now: {', '.join(comparison.not_run)}"
    return [*unlike, *own, *comparison.notes, *([skipped] if comparison.not_run else [])]


def interval_words(change: WorkloadChange) -> str:
    """+4.2% to +6.1%; a dash where nothing was compared."""
    if change.low is None or change.high is None:
        return "-"
    return relative_interval(change.low, change.high)


def moved_words(change: WorkloadChange) -> str:
    """data loading +1.50 ms; empty where no budget is known."""
    part = moved_part(change)
    if part is None:
        return ""
    label = PARTS[part.id][0].lower() if part.id in PARTS else part.id
    return f"{label} {signed(part.change_ms)} ms"


def _verdict(comparison: BenchComparison) -> str:
    slower, faster = _of(comparison, "slower"), _of(comparison, "faster")
    compared = len(comparison.workloads) - len(_of(comparison, "not comparable"))
    if not compared:
        return f"nothing could be compared with {comparison.against}"
    if not slower and not faster:
        return f"no difference seen in {counted(compared, 'workload')}"
    parts = [
        f"{way}: {', '.join(_named_change(row) for row in rows)}"
        for way, rows in (("slower", slower), ("faster", faster))
        if rows
    ]
    return f"{'; '.join(parts)}; {counted(compared, 'workload')} compared"


def _named_change(change: WorkloadChange) -> str:
    return f"{row_name(change)} {relative_change(change.change or 0.0)}"


def _why(comparison: BenchComparison) -> str:
    changed = [*_of(comparison, "slower"), *_of(comparison, "faster")]
    if changed:
        return "; ".join(_evidence(change) for change in changed)
    rows = [row for row in comparison.workloads if row.smallest_detectable is not None]
    if not rows:
        return comparison.workloads[0].why or "" if comparison.workloads else "nothing was run"
    coarse = max(rows, key=lambda row: row.smallest_detectable or 0.0)
    return (
        f"a change of {unsigned_percent(coarse.smallest_detectable or 0.0)} or more would have "
        f"been found in 4 of 5 cases, also in {row_name(coarse)}, the least certain one"
    )


def _evidence(change: WorkloadChange) -> str:
    moved = moved_words(change)
    return (
        f"{row_name(change)} takes {milliseconds(change.now_ms or 0.0)}, the base "
        f"{milliseconds(change.base_ms or 0.0)} ({interval_words(change)})"
        + (f", most of it {moved}" if moved else "")
    )


def _next(comparison: BenchComparison) -> str:
    if any(change.notes and not change.paced for change in comparison.workloads):
        return "measure the base again: the machine's own pace has changed"
    if slower := _of(comparison, "slower"):
        worst = max(slower, key=lambda row: row.change or 0.0)
        return (
            f"find what changed {row_name(worst)}; if it is meant to be slower, save new results "
            "with --save"
        )
    return "nothing to do; --save writes a new base"


def _of(comparison: BenchComparison, verdict: ChangeVerdict) -> list[WorkloadChange]:
    return [change for change in comparison.workloads if change.verdict == verdict]
