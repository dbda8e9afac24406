"""Put a comparison and the track record of predictions into sentences and JSON (schema 1)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from stepscope.records.run import RunOrigin
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
from stepscope.ui.words import PARTS, Answer, applied_line, or_dash

if TYPE_CHECKING:
    from stepscope.records.comparison import Comparison, MedianStep, OpenPromise, PhaseChange, Side
    from stepscope.records.prediction import Delivery, Promise, TrackedPromise
    from stepscope.verify.track_record import Summary

SCHEMA = 1
_MOST_PARTS = 3
_WORTH_NAMING = 0.005  # of the step
_SMALLEST_NAMED = 0.0001  # nobody asks about a smaller change


def comparison_answer(comparison: Comparison) -> Answer:
    return Answer(verdict=_verdict(comparison), why=_why(comparison), next=_next(comparison))


def steps_words(comparison: Comparison) -> str:
    """How many steps each side has."""
    how = " under the profiler" if comparison.steps_are == "profiled" else ""
    if comparison.profiled is not None:
        how += ", whose overhead is subtracted"
    return f"A {_side_words(comparison.a)}, B {_side_words(comparison.b)}{how}"


def whole_steps(comparison: Comparison) -> tuple[float, float]:
    """The step of each side, as the sum of its parts."""
    return sum(row.a_ms for row in comparison.budget), sum(row.b_ms for row in comparison.budget)


def phases_and_rest(comparison: Comparison) -> list[PhaseChange]:
    """All rows that add up to B - A; stalls are rows of their own."""
    if not comparison.rest:
        return []
    return [*comparison.phases, *comparison.stalls, comparison.rest]


def row_name(id_: str) -> str:
    """A phase of the loop, or stalls of one cause."""
    return PARTS[id_][0].lower() if id_.startswith("stall_") else id_


def median_words(comparison: Comparison) -> str:
    """What the median says, which no stall moves; "" where it is what is compared."""
    step = comparison.median
    return "" if step is None else f"median {_step_words(step)}, {_change_words(step)}"


def profiled_words(comparison: Comparison) -> str:
    """The steps as the traces have them; "" where the verdict's are those."""
    step = comparison.profiled
    return "" if step is None else f"{_step_words(step)} under the profiler, {_change_words(step)}"


def _step_words(step: MedianStep) -> str:
    return f"{significant(step.a_ms)} -> {milliseconds(step.b_ms)}"


def _change_words(step: MedianStep) -> str:
    return f"{relative_change(step.change)} ({relative_interval(step.low, step.high)})"


def promise_words(kept: TrackedPromise) -> str:
    """The promised step and the measured one."""
    promise, delivered = kept.promise, kept.delivered_ms
    promised = (
        f"the prediction for {promise.words} was {milliseconds(promise.predicted_ms)} "
        f"({interval(promise.low_ms, promise.high_ms)})"
    )
    if delivered is None or kept.error is None:
        return f"{promised}. No comparison has measured it yet"
    place = "inside the interval" if kept.inside else "outside the interval"
    of_medians = " (median steps)" if promise.basis == "median" else ""
    return (
        f"{promised}. The result is {milliseconds(delivered)}{of_medians}, "
        f"{signed_percent(kept.error)} and {place}"
    )


def run_with_words(comparison: Comparison) -> str:
    """B was run with bf16; "" where neither side was given a remedy."""
    sides = [("A", comparison.a.remedies), ("B", comparison.b.remedies)]
    return "; ".join(
        f"{name} was run with {applied_line(RunOrigin(remedies=remedies))}"
        for name, remedies in sides
        if remedies
    )


def open_words(promise: OpenPromise) -> str:
    """Why a promise stays open."""
    return f"{promise.words} ({promise.id}) stays open: {promise.why}"


def merged_notes(notes: Iterable[str]) -> list[str]:
    """Notes that differ only before their colon, as A's and B's do, become one."""
    subjects: dict[str, list[str]] = {}
    for note in notes:
        subject, _, rest = note.partition(": ")
        subjects.setdefault(rest or note, []).append(subject)
    return [
        rest if heads == [rest] else f"{', '.join(heads)}: {rest}"
        for rest, heads in subjects.items()
    ]


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """`compare --json` and `ab --json`."""
    answer = comparison_answer(comparison)
    return {
        "schema": SCHEMA,
        **to_builtins(comparison),
        "sentence": answer.verdict,
        "why": answer.why,
        "next": answer.next,
        "promise": None
        if comparison.promise is None
        else {**to_builtins(comparison.promise), **_outcome(comparison.promise)},
    }


def _outcome(kept: TrackedPromise) -> dict[str, Any]:
    return {"delivered_ms": kept.delivered_ms, "error": kept.error, "inside": kept.inside}


def _verdict(comparison: Comparison) -> str:
    ends = relative_interval(comparison.low, comparison.high)
    bounds = f"{percent(comparison.confidence)} interval {ends}"
    a, b = significant(comparison.a_ms), significant(comparison.b_ms)
    if comparison.verdict == "no difference seen":
        change = relative_change(comparison.change)
        return f"No difference seen: {a} and {b} ms a step, {change} ({bounds})."
    step = comparison.median
    if step is not None and comparison.low <= 0 <= comparison.high:
        size, ends = _more_or_less(step.change), relative_interval(step.low, step.high)
        return f"B's typical step is {comparison.verdict}: {_step_words(step)}, {size} ({ends})."
    size = _more_or_less(comparison.change)
    return f"B is {comparison.verdict}: {a} -> {b} ms a step, {size} ({bounds})."


def _more_or_less(change: float) -> str:
    return longer_or_shorter(change, longer="more", shorter="less")


def _why(comparison: Comparison) -> str:
    reasons = []
    if comparison.verdict == "no difference seen":
        smallest = _smallest(comparison.smallest_detectable)
        reasons.append(
            f"in four of five cases this comparison would have found a change of {smallest}"
        )
        if not comparison.steps_low <= 0 <= comparison.steps_high:
            reasons.append(
                "these two runs differ by "
                f"{relative_interval(comparison.steps_low, comparison.steps_high)}, but two "
                "starts of one command may differ as much"
            )
    elif changed := _changed_words(comparison):
        reasons.append(changed)
    if typical := _typical_words(comparison):
        reasons.append(typical)
    reasons.append(steps_words(comparison))
    return "; ".join(reasons)


def _smallest(share: float) -> str:
    if share < _SMALLEST_NAMED:
        return f"less than {unsigned_percent(_SMALLEST_NAMED)}"
    return unsigned_percent(share)


def _changed_words(comparison: Comparison) -> str:
    """The phases that changed by more than chance explains, over all measured steps.

    The parts of a few traced steps count only when those are the steps compared.
    """
    if comparison.steps_are == "profiled":
        rows = [(PARTS[row.id][0].lower(), row.change_ms) for row in comparison.budget]
        return _largest_words(rows, comparison.a_ms)
    changed = [
        row
        for row in (*comparison.stalls, *comparison.phases)
        if not row.low_ms <= 0 <= row.high_ms and _is_large(row.change_ms, comparison.a_ms)
    ]
    changed.sort(key=lambda row: -abs(row.change_ms))
    if not changed and comparison.phases:
        return "no single phase of the loop changed by more than noise"
    return ", ".join(_row_words(row) for row in changed[:_MOST_PARTS])


def _row_words(row: PhaseChange) -> str:
    if not row.id.startswith("stall_"):
        return f"{row.id} {signed(row.change_ms)} ms"
    way = "fell" if row.change_ms < 0 else "rose"
    ends = f"{significant(row.a_ms)} to {milliseconds(row.b_ms)}"
    return f"{row_name(row.id)} {way} from {ends} per step"


def _typical_words(comparison: Comparison) -> str:
    """The second opinion, if it is another one."""
    step = comparison.median
    if step is None:
        return ""
    if step.verdict == comparison.verdict:
        if comparison.verdict == "no difference seen" or not comparison.low <= 0 <= comparison.high:
            return ""
        ends = relative_interval(comparison.low, comparison.high)
        return (
            f"stalls leave the mean step uncertain: {relative_change(comparison.change)} ({ends})"
        )
    if step.verdict == "no difference seen":
        return "the typical step (median) shows no difference"
    change = longer_or_shorter(step.change)
    return f"the typical step (median) is {change}. The change of the mean may be noise"


def _largest_words(rows: Iterable[tuple[str, float]], step_ms: float) -> str:
    large = [row for row in rows if _is_large(row[1], step_ms)]
    large.sort(key=lambda row: -abs(row[1]))
    return ", ".join(f"{name} {signed(ms)} ms" for name, ms in large[:_MOST_PARTS])


def _is_large(change_ms: float, step_ms: float) -> bool:
    return abs(change_ms) >= _WORTH_NAMING * step_ms


def _next(comparison: Comparison) -> str:
    if comparison.steps_are == "profiled":
        return "capture both runs with stepscope run: only steps without the profiler can decide"
    from stepscope.verify.traits import SHAPES

    once = comparison.runs == 1
    if any(row.name == SHAPES for row in comparison.config):
        return (
            "a step of B does other work than a step of A (see shapes): compare samples per second"
        )
    if comparison.verdict == "no difference seen":
        more = "more starts (stepscope ab --pairs N)" if once else "more pairs or longer runs"
        return f"keep whichever is simpler. To see smaller changes: {more}"
    if comparison.verdict == "slower":
        if comparison.steps_are == "listed":
            return "go back to A, or capture both with stepscope run to see what became slower"
        return "go back to A, or see what became slower: stepscope explain on B's run folder"
    return (
        "confirm it with several starts: stepscope ab -- COMMAND_A --- COMMAND_B"
        if once
        else "keep B"
    )


def _side_words(side: Side) -> str:
    steps = sum(run.steps for run in side.runs)
    runs = f" in {len(side.runs)} runs" if len(side.runs) > 1 else ""
    independent = sum(run.effective_steps for run in side.runs)
    correlated = len(side.runs) == 1 and independent < 0.8 * steps
    worth = f" (worth {independent:.0f} independent ones)" if correlated else ""
    return f"{counted(steps, 'step')}{worth}{runs}"


SUMMARY_COLUMNS = ("change", "predicted", "measured", "median error", "bias", "inside")
PROMISE_COLUMNS = ("id", "when", "change", "before", "predicted", "measured", "error")


def record_answer(kept: Sequence[TrackedPromise]) -> Answer:
    errors = [abs(row.error) for row in kept if row.error is not None]
    waiting = len(kept) - len(errors)
    compare = "stepscope compare BEFORE AFTER, or stepscope ab -- COMMAND --- COMMAND"
    if not kept:
        return Answer(
            verdict="No prediction is recorded on this machine yet.",
            why="stepscope whatif --remember records what it predicts",
            next="stepscope whatif PATH --set NAME=VALUE --remember",
        )
    if not errors:
        return Answer(
            verdict=f"{counted(waiting, 'prediction')}, none of them measured yet.",
            why="no comparison has measured one of these changes alone",
            next=f"make the change, then {compare}",
        )
    inside = sum(bool(row.inside) for row in kept)
    who = "half of them" if len(errors) > 1 else "it"
    return Answer(
        verdict=(
            f"{counted(len(errors), 'prediction')} measured: {who} came within "
            f"{unsigned_percent(median(errors))} of the result."
        ),
        why=(
            f"{inside} of {len(errors)} results lie in the predicted 95% interval. {waiting} "
            "predictions are still open"
        ),
        next=f"measure the open ones: {compare}"
        if waiting
        else "predict more changes with stepscope whatif",
    )


def summary_cells(row: Summary) -> list[str]:
    """A what-if's row, as SUMMARY_COLUMNS has it."""
    return [
        row.name,
        str(row.promised),
        str(row.delivered),
        or_dash(row.median_error, unsigned_percent),
        or_dash(row.median_bias, signed_percent),
        or_dash(row.inside, percent),
    ]


def promise_cells(kept: TrackedPromise) -> list[str]:
    """A promise's row, as PROMISE_COLUMNS has it."""
    promise, delivered, error = kept.promise, kept.delivered_ms, kept.error
    return [
        promise.id,
        time.strftime("%Y-%m-%d %H:%M", time.localtime(promise.when_unix)),
        promise.words,
        milliseconds(promise.baseline_ms),
        f"{significant(promise.predicted_ms)} ({interval(promise.low_ms, promise.high_ms)})",
        "open" if delivered is None else milliseconds(delivered),
        or_dash(error, signed_percent),
    ]


def newest_first(kept: Sequence[TrackedPromise]) -> list[TrackedPromise]:
    return sorted(kept, key=lambda row: -row.promise.when_unix)


def unread_words(unread: int) -> str:
    return (
        f"{counted(unread, 'line')} of the record cannot be read. The file keeps them, this "
        "list leaves them out"
    )


def ignored_words(delivery: Delivery, why: str) -> str:
    return (
        f"a result for {delivery.promise} ({significant(delivery.a_ms)} -> "
        f"{milliseconds(delivery.b_ms)}) does not count: {why}"
    )


def forgotten_words(promise: Promise, *, delivery_only: bool) -> str:
    if delivery_only:
        return f"removed the result of {promise.id} ({promise.words}). The prediction is open again"
    return f"removed {promise.id} ({promise.words})"


def record_json(
    kept: Sequence[TrackedPromise],
    rows: Sequence[Summary],
    folder: Path,
    unread: int = 0,
    ignored: Sequence[tuple[Delivery, str]] = (),
) -> dict[str, Any]:
    """`record --json`."""
    return {
        "schema": SCHEMA,
        **to_builtins(record_answer(kept)),
        "folder": str(folder),
        "unread_lines": unread,
        "ignored": [{**to_builtins(delivery), "why": why} for delivery, why in ignored],
        "what_ifs": [to_builtins(row) for row in rows],
        "promises": [
            {
                **to_builtins(row.promise),
                "name": row.promise.name,
                "delivery": to_builtins(row.delivery),
                **_outcome(row),
            }
            for row in kept
        ],
    }
