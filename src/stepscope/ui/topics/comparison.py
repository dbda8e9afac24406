"""Put a comparison and the track record of predictions into sentences, tables and JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from msgspec import to_builtins

from stepscope.records.comparison import (
    Comparison,
    MedianStep,
    NameChange,
    OpenPromise,
    PhaseChange,
    RunSteps,
    Side,
    SlowSteps,
)
from stepscope.records.prediction import Delivery, Promise, TrackedPromise
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
    size,
    unsigned_percent,
)
from stepscope.text.words import counted, sentence
from stepscope.ui.topics.section import Column, Table
from stepscope.ui.words import PARTS, Answer, applied_line, or_dash, short_kernel
from stepscope.verify.track_record import Summary

SCHEMA = 1
_MOST_PARTS = 3
_WORTH_NAMING = 0.005  # of the step
_SMALLEST_NAMED = 0.0001  # nobody asks about a smaller change
_LONGEST_NAME = 100
_PHASES = {
    "data": "Data",
    "forward": "Forward",
    "backward": "Backward",
    "optimizer": "Optimizer",
    "other": "Other",
    "rest": "Rest of the step",
}


class Fact(NamedTuple):
    """A line under the verdict, and what a page calls it."""

    label: str
    words: str
    title: str = ""  # without one the page shows it elsewhere
    page_words: str = ""  # where they differ
    style: str = ""  # in a terminal


def comparison_facts(comparison: Comparison) -> list[Fact]:
    """What is known besides the verdict."""
    facts = []
    sides = [("A", comparison.a.remedies), ("B", comparison.b.remedies)]
    if run_with := "; ".join(
        f"{name} was run with {applied_line(RunOrigin(remedies=remedies))}"
        for name, remedies in sides
        if remedies
    ):
        facts.append(Fact("with", run_with, "Changes"))
    if (step := comparison.median) is not None:
        words = f"median {_step_words(step)}, {_change_words(step)}"
        facts.append(Fact("typical", words, "Typical step"))
    if (step := comparison.profiled) is not None:
        words = f"{_step_words(step)} under the profiler, {_change_words(step)}"
        facts.append(Fact("profiled", words, "As recorded", style="bright_black"))
    if (slow := comparison.slow_steps) is not None:
        facts.append(
            Fact(
                "slow steps",
                f"95th percentile {_step_words(slow)}, {_change_words(slow)}",
                "Slow steps, 95th percentile",
                f"{_step_words(slow)} ({relative_interval(slow.low, slow.high)})",
            )
        )
    before, after = comparison.a_peak_bytes, comparison.b_peak_bytes
    if before is not None and after is not None:
        peaks = f"{size(before)} -> {size(after)}"
        words = f"peak {peaks}, {relative_change(after / before - 1)}"
        facts.append(Fact("memory", words, "Memory peak", peaks))
    facts += [
        Fact("prediction", words, style="green" if is_inside else "yellow")
        for words, is_inside in promise_sentences(comparison)
    ]
    return facts


def _step_words(step: MedianStep | SlowSteps) -> str:
    return f"{significant(step.a_ms)} -> {milliseconds(step.b_ms)}"


def _change_words(step: MedianStep | SlowSteps) -> str:
    return f"{relative_change(step.change)} ({relative_interval(step.low, step.high)})"


def promise_sentences(comparison: Comparison) -> list[tuple[str, bool]]:
    """What was predicted of this change, and whether the result lies in the interval."""
    tracked = comparison.promise
    closed = [(_promise_words(tracked), bool(tracked.inside))] if tracked else []
    return closed + [(_open_words(promise), False) for promise in comparison.open_promises]


def _promise_words(tracked: TrackedPromise) -> str:
    promise, delivered = tracked.promise, tracked.delivered_ms
    predicted = (
        f"the prediction for {promise.words} was {milliseconds(promise.predicted_ms)} "
        f"({interval(promise.low_ms, promise.high_ms)})"
    )
    if delivered is None or tracked.error is None:
        return f"{predicted}. No comparison has measured it yet"
    of_medians = " (median steps)" if promise.basis == "median" else ""
    return (
        f"{predicted}. The result is {milliseconds(delivered)}{of_medians}, "
        f"{signed_percent(tracked.error)} and {'inside' if tracked.inside else 'outside'} "
        "the interval"
    )


def _open_words(promise: OpenPromise) -> str:
    return f"{promise.words} ({promise.id}) stays open: {promise.why}"


def whole_steps(comparison: Comparison) -> tuple[float, float]:
    """The step of each side, as the sum of its parts."""
    return sum(row.a_ms for row in comparison.budget), sum(row.b_ms for row in comparison.budget)


def phases_and_rest(comparison: Comparison) -> list[PhaseChange]:
    """All rows that add up to B - A; stalls are rows of their own."""
    if not comparison.rest:
        return []
    return [*comparison.phases, *comparison.stalls, comparison.rest]


def _row_name(id_: str) -> str:
    return PARTS[id_][0].lower() if id_.startswith("stall_") else id_


def phase_name(row: PhaseChange) -> str:
    """A phase of the loop or stalls of one cause, as a page writes it."""
    return _PHASES.get(row.id) or sentence(_row_name(row.id))


def signed_ms(ms: float) -> str:
    """With its sign; what is not worth three digits is 0."""
    return "0" if abs(ms) < 5e-4 else signed(ms)


def _between(row: PhaseChange, words: Callable[[float], str]) -> str:
    return f"{words(row.low_ms)} to {words(row.high_ms)}"


def phase_table(comparison: Comparison, rows: Iterable[PhaseChange]) -> Table[PhaseChange]:
    stalls = ", stalls per mean step" if comparison.stalls else ""
    return Table(
        title=f"phases of the loop, median of all steps{stalls}, ms",
        columns=(
            Column("phase", lambda row: _row_name(row.id), "", phase_name),
            Column(">A", lambda row: significant(row.a_ms), ">A, ms"),
            Column(">B", lambda row: significant(row.b_ms), ">B, ms"),
            Column(
                ">change",
                lambda row: signed(row.change_ms),
                ">change, ms",
                lambda row: signed_ms(row.change_ms),
            ),
            Column(
                f">{percent(comparison.confidence)} interval",
                lambda row: _between(row, signed),
                ">interval, ms",
                lambda row: _between(row, signed_ms),
            ),
            Column("", lambda row: "" if row.low_ms <= 0 <= row.high_ms else "changed"),
        ),
        rows=rows,
    )


def run_table(comparison: Comparison, width: int) -> Table[tuple[str, RunSteps]]:
    """Every run of both sides; paths are cut to what the terminal's width leaves them."""

    def path(run: RunSteps) -> str:
        return f"{run.path}{f' rank {run.rank}' if run.rank is not None else ''}"

    return Table(
        title="runs",
        columns=(
            Column("", lambda row: row[0], "run", lambda row: f"{row[0]} · {path(row[1])}"),
            Column(
                ">mean",
                lambda row: milliseconds(row[1].mean_ms),
                ">mean, ms",
                lambda row: significant(row[1].mean_ms),
            ),
            Column(
                ">median",
                lambda row: milliseconds(row[1].median_ms),
                ">median, ms",
                lambda row: significant(row[1].median_ms),
            ),
            Column(">steps", lambda row: str(row[1].steps), ">steps"),
            Column(">effective", lambda row: f"{row[1].effective_steps:.0f}", ">independent"),
            Column(
                ">warm-up",
                lambda row: str(row[1].warm_up or ""),
                ">warm-up left out",
                lambda row: str(row[1].warm_up),
            ),
            Column(
                ">drift",
                lambda row: signed_percent(row[1].drift) if row[1].drift else "",
                ">drift",
                lambda row: signed_percent(row[1].drift) if row[1].drift else "-",
            ),
            Column("path", lambda row: short_kernel(path(row[1]), max(16, width - 55))),
        ),
        rows=[(name, run) for name in "AB" for run in getattr(comparison, name.lower()).runs],
    )


def name_table(rows: Iterable[NameChange], width: int) -> Table[NameChange]:
    """Kernels or operators; names are cut to what the terminal's width leaves them."""

    def ms(absent: str, value: float | None) -> str:
        return absent if value is None else significant(value)

    def calls(row: NameChange) -> str:
        a, b = (f"{calls:.4g}" if calls else "0" for calls in (row.a_calls, row.b_calls))
        return a if a == b else f"{a} -> {b}"

    def number(calls: float | None) -> str:
        return or_dash(calls, "{:.4g}".format)

    return Table(
        columns=(
            Column(None, lambda row: short_kernel(row.name, _LONGEST_NAME), ""),
            Column(">change", lambda row: signed(row.change_ms)),
            Column(">A", lambda row: ms("new", row.a_ms), ">A, ms", lambda row: ms("-", row.a_ms)),
            Column(">B", lambda row: ms("gone", row.b_ms), ">B, ms", lambda row: ms("-", row.b_ms)),
            Column(None, lambda row: signed_ms(row.change_ms), ">change, ms"),
            Column(">calls", calls),
            Column(None, lambda row: number(row.a_calls), ">calls A"),
            Column(None, lambda row: number(row.b_calls), ">calls B"),
            Column("name", lambda row: short_kernel(row.name, max(16, width - 44))),
        ),
        rows=rows,
    )


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
    answer, promise = comparison_answer(comparison), comparison.promise
    return {
        "schema": SCHEMA,
        **to_builtins(comparison),
        "sentence": answer.verdict,
        "why": answer.why,
        "next": answer.next,
        "promise": {**to_builtins(promise), **_outcome(promise)} if promise else None,
    }


def _outcome(tracked: TrackedPromise) -> dict[str, Any]:
    return {name: getattr(tracked, name) for name in ("delivered_ms", "error", "inside")}


def comparison_answer(comparison: Comparison) -> Answer:
    return Answer(verdict=_verdict(comparison), why=_why(comparison), next=_next(comparison))


def _verdict(comparison: Comparison) -> str:
    ends = relative_interval(comparison.low, comparison.high)
    bounds = f"{percent(comparison.confidence)} interval {ends}"
    a, b = significant(comparison.a_ms), significant(comparison.b_ms)
    if comparison.verdict == "no difference seen":
        change = relative_change(comparison.change)
        return f"No difference seen: {a} and {b} ms a step, {change} ({bounds})."
    more_or_less = partial(longer_or_shorter, longer="more", shorter="less")
    step = comparison.median
    if step is not None and comparison.low <= 0 <= comparison.high:
        size, ends = more_or_less(step.change), relative_interval(step.low, step.high)
        return f"B's typical step is {comparison.verdict}: {_step_words(step)}, {size} ({ends})."
    size = more_or_less(comparison.change)
    return f"B is {comparison.verdict}: {a} -> {b} ms a step, {size} ({bounds})."


def _why(comparison: Comparison) -> str:
    reasons = []
    if comparison.verdict == "no difference seen":
        smallest = unsigned_percent(max(comparison.smallest_detectable, _SMALLEST_NAMED))
        if comparison.smallest_detectable < _SMALLEST_NAMED:
            smallest = f"less than {smallest}"
        reasons.append(
            f"in four of five cases this comparison would have found a change of {smallest}"
        )
        if not comparison.steps_low <= 0 <= comparison.steps_high:
            reasons.append(
                "these two runs differ by "
                f"{relative_interval(comparison.steps_low, comparison.steps_high)}, but two "
                "starts of one command may differ as much"
            )
    else:
        reasons.append(_changed_words(comparison))
    how = " under the profiler" if comparison.steps_are == "profiled" else ""
    if comparison.profiled is not None:
        how += ", whose overhead is subtracted"
    steps = f"A {_side_words(comparison.a)}, B {_side_words(comparison.b)}{how}"
    return "; ".join(filter(None, (*reasons, _typical_words(comparison), steps)))


def _side_words(side: Side) -> str:
    steps = sum(run.steps for run in side.runs)
    runs = f" in {len(side.runs)} runs" if len(side.runs) > 1 else ""
    independent = sum(run.effective_steps for run in side.runs)
    correlated = len(side.runs) == 1 and independent < 0.8 * steps
    worth = f" (worth {independent:.0f} independent ones)" if correlated else ""
    return f"{counted(steps, 'step')}{worth}{runs}"


def _changed_words(comparison: Comparison) -> str:
    """The phases that changed by more than chance explains, over all measured steps.

    The parts of a few traced steps count only when those are the steps compared.
    """
    least = _WORTH_NAMING * comparison.a_ms
    if comparison.steps_are == "profiled":
        parts = [row for row in comparison.budget if abs(row.change_ms) >= least]
        parts.sort(key=lambda row: -abs(row.change_ms))
        return ", ".join(
            f"{PARTS[row.id][0].lower()} {signed(row.change_ms)} ms" for row in parts[:_MOST_PARTS]
        )
    changed = [
        row
        for row in (*comparison.stalls, *comparison.phases)
        if not row.low_ms <= 0 <= row.high_ms and abs(row.change_ms) >= least
    ]
    changed.sort(key=lambda row: -abs(row.change_ms))
    if not changed and comparison.phases:
        return "no single phase of the loop changed by more than noise"
    return ", ".join(_phase_words(row) for row in changed[:_MOST_PARTS])


def _phase_words(row: PhaseChange) -> str:
    if not row.id.startswith("stall_"):
        return f"{row.id} {signed(row.change_ms)} ms"
    way = "fell" if row.change_ms < 0 else "rose"
    ends = f"{significant(row.a_ms)} to {milliseconds(row.b_ms)}"
    return f"{_row_name(row.id)} {way} from {ends} per step"


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
    if once:
        return "confirm it with several starts: stepscope ab -- COMMAND_A --- COMMAND_B"
    return "keep B"


# The track record: promised against delivered.

SUMMARY_COLUMNS = ("change", "predicted", "measured", "median error", "bias", "inside")
PROMISE_COLUMNS = ("id", "when", "change", "before", "predicted", "measured", "error")


def record_answer(tracked: Sequence[TrackedPromise]) -> Answer:
    errors = [abs(row.error) for row in tracked if row.error is not None]
    waiting = len(tracked) - len(errors)
    compare = "stepscope compare BEFORE AFTER, or stepscope ab -- COMMAND --- COMMAND"
    if not tracked:
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
    inside = sum(bool(row.inside) for row in tracked)
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


def promise_cells(tracked: TrackedPromise) -> list[str]:
    """A promise's row, as PROMISE_COLUMNS has it."""
    promise, delivered = tracked.promise, tracked.delivered_ms
    return [
        promise.id,
        time.strftime("%Y-%m-%d %H:%M", time.localtime(promise.when_unix)),
        promise.words,
        milliseconds(promise.baseline_ms),
        f"{significant(promise.predicted_ms)} ({interval(promise.low_ms, promise.high_ms)})",
        "open" if delivered is None else milliseconds(delivered),
        or_dash(tracked.error, signed_percent),
    ]


def newest_first(tracked: Sequence[TrackedPromise]) -> list[TrackedPromise]:
    return sorted(tracked, key=lambda row: -row.promise.when_unix)


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
    tracked: Sequence[TrackedPromise],
    rows: Sequence[Summary],
    folder: Path,
    unread: int = 0,
    ignored: Sequence[tuple[Delivery, str]] = (),
) -> dict[str, Any]:
    """`record --json`."""
    return {
        "schema": SCHEMA,
        **to_builtins(record_answer(tracked)),
        "folder": str(folder),
        "unread_lines": unread,
        "ignored": [{**to_builtins(delivery), "why": why} for delivery, why in ignored],
        "what_ifs": to_builtins(list(rows)),
        "promises": [
            {
                **to_builtins(row.promise),
                "name": row.promise.name,
                "delivery": to_builtins(row.delivery),
                **_outcome(row),
            }
            for row in tracked
        ],
    }
