"""Put a bench's answer, its scaling studies and its comparison with saved results into
sentences for every surface.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from stepscope.bench.against import moved_part
from stepscope.bench.results import (
    BenchComparison,
    BenchResults,
    ChangeVerdict,
    ScalingStudy,
    StudyPoint,
    WorkloadChange,
    WorkloadResult,
)
from stepscope.text.figures import (
    interval,
    longer_or_shorter,
    milliseconds,
    percent,
    relative_change,
    relative_interval,
    signed,
    signed_percent,
    significant,
    unsigned_percent,
)
from stepscope.text.words import counted
from stepscope.ui.words import PARTS, Answer

_MOST_NAMES = 6  # in a sentence


def row_name(row: WorkloadResult | WorkloadChange) -> str:
    """gpt2, gpt2 with bf16 + fused-optimizer."""
    return f"{row.name} with {' + '.join(row.remedies)}" if row.remedies else row.name


def row_names(rows: Sequence[WorkloadResult]) -> list[str]:
    """Rows of one name, those of a scaling study, are told apart by batch and ranks."""
    names = [row_name(row) for row in rows]
    return [
        f"{name}, batch {row.settings.get('batch')}, {counted(row.ranks, 'rank')}"
        if names.count(name) > 1
        else name
        for name, row in zip(names, rows, strict=True)
    ]


def bench_answer(results: BenchResults) -> Answer:
    return Answer(verdict=_verdict(results), why=_why(results.workloads), next=_next(results))


def _verdict(results: BenchResults) -> str:
    rows = results.workloads
    measured = [row for row in rows if row.status == "measured"]
    missed = [row for row in measured if row.target_reached is False]
    each_once = len({row.name for row in rows}) == len(rows)
    of_all = counted(len(rows), "workload" if each_once else "row")
    if len(measured) < len(rows):
        others = [row_name(row) for row in rows if row.status != "measured"]
        more = f" and {len(others) - _MOST_NAMES} more" if len(others) > _MOST_NAMES else ""
        named = ", ".join(others[:_MOST_NAMES])
        return f"{len(measured)} of {of_all} measured. Not measured: {named}{more}"
    if missed:
        names = ", ".join(map(row_name, missed))
        return f"{of_all} measured. The loss of {names} did not reach its target"
    known = sum(row.target_reached is True for row in measured)
    return f"{of_all} measured" + (f". {known} reached the target loss" if known else "")


def _why(rows: Sequence[WorkloadResult]) -> str:
    """The range of each share over the workloads, with the names at its ends."""
    sentences = [
        _range("the device works for", rows, lambda row: row.busy, "of the step"),
        _range("MFU is", rows, lambda row: row.mfu, ""),
        _range("the processor's cores are busy for", rows, lambda row: row.cpu, ""),
    ]
    return "; ".join(filter(None, sentences)) or "nothing was measured"


def _range(
    words: str,
    rows: Sequence[WorkloadResult],
    of: Callable[[WorkloadResult], float | None],
    after: str,
) -> str:
    known = sorted(
        (
            (value, name)
            for row, name in zip(rows, row_names(rows), strict=True)
            if (value := of(row)) is not None
        ),
        key=lambda pair: pair[0],
    )
    if not known:
        return ""
    (low, lowest), (high, highest) = known[0], known[-1]
    share = percent(high)
    if percent(low) != share:
        share = f"{percent(low)} ({lowest}) to {percent(high)} ({highest})"
    return f"{words} {share} {after}".rstrip()


def _next(results: BenchResults) -> str:
    failed = next((row for row in results.workloads if row.status == "failed" and row.folder), None)
    if failed is not None:
        return f"the output of {row_name(failed)} is in {failed.folder}/output.txt"
    if results.broken_rules:
        return f"these results support no claim yet: {results.broken_rules[0]}"
    slowest = min(
        (row for row in results.workloads if row.busy is not None and row.folder),
        key=lambda row: row.busy or 0.0,
        default=None,
    )
    if slowest is None:
        return "stepscope bench --list names the workloads"
    return f"stepscope explain {shlex.quote(slowest.folder or '')} explains {row_name(slowest)}"


def rerun_words(results: BenchResults) -> str:
    """Whether anybody has run a saved file's command again, and what came of it."""
    if not results.reruns:
        return "nobody has repeated this run yet: stepscope bench --again FILE does"
    last = results.reruns[-1]
    times = counted(len(results.reruns), "time")
    if last.agrees is None:
        return f"repeated {times}. The last one could not be compared"
    if last.agrees:
        return f"repeated {times}. The last one, on {last.host}, agrees"
    return f"repeated {times}. The last one, on {last.host}, does not agree: " + "; ".join(
        last.differs
    )


def speed_words(row: WorkloadResult) -> str:
    """1.34 (1.30 to 1.38): times as fast as without the remedies; "" where not compared."""
    if row.speedup is None:
        return ""
    if row.speedup_low is None or row.speedup_high is None:
        return significant(row.speedup)
    return f"{significant(row.speedup)} ({interval(row.speedup_low, row.speedup_high)})"


_WORTH_SAYING = 0.02  # of the step


def against_answer(comparison: BenchComparison) -> Answer:
    return Answer(
        verdict=_against_verdict(comparison),
        why=_against_why(comparison),
        next=_against_next(comparison),
    )


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


def _against_verdict(comparison: BenchComparison) -> str:
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


def _against_why(comparison: BenchComparison) -> str:
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


def _against_next(comparison: BenchComparison) -> str:
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


def saturation_words(study: ScalingStudy) -> str:
    """Empty unless several batches were measured."""
    measured = [point for point in study.points if point.samples_per_s is not None]
    if len({point.batch for point in measured}) < 2:
        return ""
    if study.saturates_at is None:
        return "no batch here saturates the device. Each doubling still gains 10% or more"
    return f"from batch {study.saturates_at:,} on, doubling it gains less than 10%"


def efficiency_words(study: ScalingStudy) -> str:
    """Of the most ranks; empty if only one number of ranks was measured."""
    known = [point for point in study.points if point.efficiency is not None]
    if not known:
        return ""
    most = max(known, key=lambda point: (point.ranks, point.batch))
    ranks = counted(most.ranks, "rank")
    return f"{ranks} keep {percent(most.efficiency or 0.0)} of each rank's throughput"


def prediction_words(points: Sequence[StudyPoint]) -> str:
    """How far predictions are from what was measured; empty without any."""
    errors = [error for point in points if (error := prediction_error(point)) is not None]
    if not errors:
        return ""
    mean, worst = sum(map(abs, errors)) / len(errors), max(errors, key=abs)
    return (
        f"{counted(len(errors), 'prediction')}: off by {unsigned_percent(mean)} on average, "
        f"{signed_percent(worst)} at worst"
    )


def prediction_error(point: StudyPoint) -> float | None:
    """Predicted over measured throughput, less one."""
    if not point.predicted_samples_per_s or not point.samples_per_s:
        return None
    return point.predicted_samples_per_s / point.samples_per_s - 1
