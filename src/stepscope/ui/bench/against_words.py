"""A bench against saved results, in sentences for every surface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.bench.against import moved_part
from stepscope.records.figures import (
    longer_or_shorter,
    milliseconds,
    percent,
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

_WORTH_SAYING = 0.02  # of the step


def against_answer(comparison: BenchComparison) -> Answer:
    return Answer(verdict=_verdict(comparison), why=_why(comparison), next=_next(comparison))


def against_notes(comparison: BenchComparison) -> list[str]:
    """What to know before the verdict is believed."""
    rows = comparison.workloads
    unlike = [f"{row_name(row)} cannot be compared: {row.why}" for row in rows if row.why]
    own = [f"{row_name(row)}: {note}" for row in rows for note in (*row.notes, *_others_note(row))]
    skipped = f"saved in the base but not run this time: {', '.join(comparison.not_run)}"
    return [*unlike, *own, *comparison.notes, *([skipped] if comparison.not_run else [])]


def _others_note(change: WorkloadChange) -> list[str]:
    """Where that differs; runs beside a yardstick have a note about the whole machine."""
    before, now = change.base_others, change.now_others
    if before is None or now is None or change.paced or abs(now - before) < _WORTH_SAYING:
        return []
    return [
        f"other programs used the cores for {percent(now)} of the step. When the base was "
        f"measured, it was {percent(before)}. The reported change leaves this out"
    ]


def interval_words(change: WorkloadChange) -> str:
    """+4.2% to +6.1%, of what decided; a dash where nothing was compared."""
    if change.counted_low is None or change.counted_high is None:
        return "-"
    return relative_interval(change.counted_low, change.counted_high)


def moved_words(change: WorkloadChange) -> str:
    """data loading +1.50 ms, or waiting +0.23 ms; empty where no budget is known."""
    if change.decided_by == "waiting" and change.waiting is not None:
        return f"waiting {signed(change.waiting.now_ms - change.waiting.base_ms)} ms"
    part = moved_part(change)
    if part is None:
        return ""
    label = PARTS[part.id][0].lower() if part.id in PARTS else part.id
    return f"{label} {signed(part.change_ms)} ms"


def parts_words(change: WorkloadChange) -> str:
    """waits 5.1% of the step longer (4.7% to 5.5%); computing: no difference seen (-3% to +4%)."""
    waits, computes = change.waiting, change.computing
    if waits is None or computes is None:
        return ""
    waiting = "waiting: no difference seen"
    if waits.low > 0:
        waiting = f"waits longer, by {unsigned_percent(waits.change)} of the step"
    elif waits.high < 0:
        waiting = f"waits less, by {unsigned_percent(waits.change)} of the step"
    computing = "computing: no difference seen"
    if computes.low > 0 or computes.high < 0:
        computing = f"computes {longer_or_shorter(computes.change)}"
    return (
        f"{waiting} ({relative_interval(waits.low, waits.high)}); "
        f"{computing} ({relative_interval(computes.low, computes.high)})"
    )


def _verdict(comparison: BenchComparison) -> str:
    slower, faster = _of(comparison, "slower"), _of(comparison, "faster")
    compared = len(comparison.workloads) - len(_of(comparison, "not comparable"))
    if not compared:
        return f"no workload could be compared with {comparison.against}"
    if not slower and not faster:
        return f"no difference seen in {counted(compared, 'workload')}"
    parts = [
        f"{way}: {', '.join(_named_change(row) for row in rows)}"
        for way, rows in (("slower", slower), ("faster", faster))
        if rows
    ]
    return f"{'; '.join(parts)}; {counted(compared, 'workload')} compared"


def _named_change(change: WorkloadChange) -> str:
    return f"{row_name(change)} {relative_change(change.counted_change or 0.0)}"


def _why(comparison: BenchComparison) -> str:
    changed = [*_of(comparison, "slower"), *_of(comparison, "faster")]
    if changed:
        return "; ".join(_evidence(change) for change in changed)
    rows = [row for row in comparison.workloads if row.smallest_detectable is not None]
    if not rows:
        return comparison.workloads[0].why or "" if comparison.workloads else "nothing was run"
    coarse = max(rows, key=lambda row: row.smallest_detectable or 0.0)
    waits = [row.waiting.smallest_detectable for row in rows if row.waiting is not None]
    return (
        "in 4 of 5 cases this would show a change of "
        f"{unsigned_percent(coarse.smallest_detectable or 0.0)} or more, even in "
        f"{row_name(coarse)}, the noisiest one"
        + (f", and a wait of {unsigned_percent(max(waits))} of the step" if waits else "")
    )


def _evidence(change: WorkloadChange) -> str:
    if change.decided_by == "waiting":
        return f"{row_name(change)} {parts_words(change)}"
    moved = moved_words(change)
    return (
        f"{row_name(change)} takes {milliseconds(change.now_ms or 0.0)}. The base took "
        f"{milliseconds(change.base_ms or 0.0)} ({interval_words(change)})"
        + (f", mostly {moved}" if moved else "")
        + (f". {parts}" if (parts := parts_words(change)) else "")
    )


def _next(comparison: BenchComparison) -> str:
    if any(
        (change.notes or change.machine_changed)
        and not change.paced
        and change.decided_by == "step"
        for change in comparison.workloads
    ):
        return "measure the base again: the machine's own speed has changed"
    if slower := _of(comparison, "slower"):
        worst = max(slower, key=lambda row: row.counted_change or 0.0)
        if worst.decided_by == "waiting":
            return (
                f"find what {row_name(worst)} waits for: a sleep, a file, a lock or another process"
            )
        return (
            f"find what changed {row_name(worst)}. If it is meant to be slower, save new "
            "results with --save"
        )
    return "nothing to do. --save writes a new base"


def _of(comparison: BenchComparison, verdict: ChangeVerdict) -> list[WorkloadChange]:
    return [change for change in comparison.workloads if change.verdict == verdict]
