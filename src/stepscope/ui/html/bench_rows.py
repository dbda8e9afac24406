"""Show the workloads of a bench side by side: one row each, one small chart per metric, and
what they are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from stepscope.bench.results import BenchComparison, BenchResults, WorkloadChange, WorkloadResult
from stepscope.text.figures import (
    interval,
    long_duration,
    milliseconds,
    percent,
    rate,
    relative_change,
    significant,
    size,
    unsigned_percent,
)
from stepscope.text.words import counted, sentence
from stepscope.ui.bench.words import interval_words, moved_words, parts_words, speed_words
from stepscope.ui.words import one_line

_EDGE = 3.0  # percent of a track's width that no dot comes nearer to its ends
_LONGEST_NAME = 60
_MILLION = 999_500.0  # from here on numbers are too long to read


class BenchMetric(NamedTuple):
    """A column. Amounts that differ by powers of ten lie on a logarithmic scale, as dots."""

    id: str
    title: str
    hint: str
    value: Callable[[WorkloadResult], float | None]
    words: Callable[[WorkloadResult, float], str]
    logarithmic: bool = False
    whole: float | None = None  # what a full bar stands for; None: the largest value


class MetricCell(NamedTuple):
    """A value of one workload; places are percentages of the track's width."""

    value: float | None  # sorted by; None is not known
    words: str
    aside: str = ""  # smaller, behind the words
    at: float | None = None
    reach: tuple[float, float] | None = None
    before: float | None = None
    tone: str = ""


class BenchRow(NamedTuple):
    """One workload that was measured."""

    key: str  # the same in every chart of the page
    name: str
    about: str  # what tells it apart from others of the same name
    verdict: str
    tip: str
    cells: tuple[MetricCell, ...]
    compared: tuple[ComparedCell | None, ...]  # one for each column of comparisons


def _throughput(row: WorkloadResult, value: float) -> str:
    """847 images/s, 19.6 M ratings/s."""
    unit = f" {one_line(row.samples)}/s"
    return rate(value, unit) if value >= _MILLION else f"{significant(value)}{unit}"


def _share(
    id_: str, title: str, hint: str, value: Callable[[WorkloadResult], float | None]
) -> BenchMetric:
    return BenchMetric(id_, title, hint, value, lambda _, share: percent(share), whole=1.0)


METRICS = (
    BenchMetric(
        "throughput",
        "Throughput",
        "Samples a second of the whole job, with its 95% interval.",
        lambda row: row.samples_per_s,
        _throughput,
        logarithmic=True,
    ),
    BenchMetric(
        "step",
        "Step",
        "Mean of all runs, without start-up. Explain and serve show one run.",
        lambda row: row.step_ms,
        lambda _, ms: milliseconds(ms),
        logarithmic=True,
    ),
    _share(
        "busy",
        "Device busy",
        "Share of the step in which the device works.",
        lambda row: row.busy,
    ),
    _share(
        "mfu",
        "MFU",
        "Model FLOPs utilization: the model's arithmetic as a share of the device's peak.",
        lambda row: row.mfu,
    ),
    _share("cpu", "CPU", "CPU time divided by wall time and cores.", lambda row: row.cpu),
    BenchMetric(
        "memory",
        "Peak memory",
        "The most bytes allocated at once.",
        lambda row: row.peak_bytes,
        lambda _, held: size(held),
    ),
    BenchMetric(
        "target",
        "Time to target",
        "Training time until the loss reaches the workload's target, without start-up.",
        lambda row: row.time_to_target_s,
        lambda _, seconds: long_duration(seconds * 1e9),
        logarithmic=True,
    ),
)


def shown_metrics(results: Sequence[WorkloadResult]) -> list[BenchMetric]:
    """Metrics that at least one workload has."""
    return [
        metric for metric in METRICS if any(metric.value(result) is not None for result in results)
    ]


def bench_rows(
    measured: Mapping[str, WorkloadResult],
    before: Mapping[str, WorkloadResult],
    compared: Sequence[ComparedColumn],
) -> list[BenchRow]:
    """Everything by key; `before` are the rows that each is shown beside."""
    metrics = shown_metrics(list(measured.values()))
    scales = [_scale(metric, [*measured.values(), *before.values()]) for metric in metrics]
    rows = []
    for (key, result), about in zip(
        measured.items(), distinctions(list(measured.values())), strict=True
    ):
        cells = tuple(
            _cell(metric, result, before.get(key), scale)
            for metric, scale in zip(metrics, scales, strict=True)
        )
        name, verdict = short_name(result.name), sentence(one_line(result.verdict or ""))
        others = tuple(column.cells.get(key) for column in compared)
        rows.append(BenchRow(key, name, about, verdict, _describe(result), cells, others))
    return rows


def distinctions(results: Sequence[WorkloadResult]) -> list[str]:
    """Per workload its size, ranks, remedies and settings, each only where rows differ in it."""
    unchanged = "unchanged" if any(result.remedies for result in results) else ""
    facts = [
        (result.size, counted(result.ranks, "rank"), " + ".join(result.remedies) or unchanged)
        for result in results
    ]
    differ = [len(set(column)) > 1 for column in zip(*facts, strict=True)]
    # A setting tells rows apart where rows of one workload and size differ in it.
    values: dict[tuple[str, str], dict[str, set[str]]] = {}
    for result in results:
        for name, value in result.settings.items():
            by_size = values.setdefault((result.name, name), {})
            by_size.setdefault(result.size, set()).add(str(value))
    varied = [pair for pair, sizes in values.items() if max(map(len, sizes.values())) > 1]
    return [
        " · ".join(
            one_line(word)
            for word in (
                *(word for word, differs in zip(row, differ, strict=True) if differs and word),
                *(
                    f"{name} {result.settings.get(name, '–')}"
                    for workload, name in varied
                    if workload == result.name
                ),
            )
        )
        for row, result in zip(facts, results, strict=True)
    ]


def short_name(name: str) -> str:
    plain = one_line(name)
    return plain if len(plain) <= _LONGEST_NAME else f"{plain[: _LONGEST_NAME - 1]}…"


def _describe(result: WorkloadResult) -> str:
    """The tip on a workload: a title and lines under it."""
    lines = [f"{short_name(result.name)}, size {one_line(result.size)}"]
    if result.ranks > 1:
        lines.append(counted(result.ranks, "rank"))
    if result.remedies:
        lines.append("with " + ", ".join(map(one_line, result.remedies)))
    if result.settings:
        pairs = (f"{name} {value}" for name, value in result.settings.items())
        lines.append(one_line(", ".join(pairs)))
    if result.samples_per_s is not None:
        known = result.low is not None and result.high is not None
        ends = f" ({interval(result.low or 0.0, result.high or 0.0)})" if known else ""
        lines.append(_throughput(result, result.samples_per_s) + ends)
    if result.runs_ms:
        runs = ", ".join(map(significant, result.runs_ms))
        lines.append(f"{counted(len(result.runs_ms), 'run')}, mean step each: {runs} ms")
    if result.predicted_peak_bytes is not None:
        lines.append(f"peak memory predicted before the run: {size(result.predicted_peak_bytes)}")
    shares = {**result.compute_share, **result.counters}
    lines += [f"{one_line(name)}: {percent(share)}" for name, share in shares.items()]
    lines += [one_line(note) for note in (result.verdict or "", *result.notes) if note]
    return "\n".join(map(sentence, lines))


Scale = tuple[float, float]


def _scale(metric: BenchMetric, results: Sequence[WorkloadResult]) -> Scale:
    """The values at the ends of a column's track."""
    values = [value for result in results if (value := metric.value(result)) is not None]
    if metric.whole is not None:
        return 0.0, max([metric.whole, *values])
    if not metric.logarithmic:
        return 0.0, max(values, default=0.0) or 1.0
    if metric.id == "throughput":
        values += [end for result in results for end in (result.low, result.high) if end]
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    # Values that are nearly equal must not lie at opposite ends.
    wider = math.sqrt(max(10 * low / high, 1.0))
    return low / wider, high * wider


def _place(metric: BenchMetric, value: float, scale: Scale) -> float:
    low, high = scale
    if not metric.logarithmic:
        return 100 * min(max(value / high, 0.0), 1.0)
    if value <= 0 or high <= low:
        return 50.0
    share = math.log(value / low) / math.log(high / low)
    return _EDGE + (100 - 2 * _EDGE) * min(max(share, 0.0), 1.0)


def _cell(
    metric: BenchMetric, result: WorkloadResult, before: WorkloadResult | None, scale: Scale
) -> MetricCell:
    value = metric.value(result)
    old = metric.value(before) if before else None
    if value is None:
        missed = metric.id == "target" and result.target_reached is False
        words, tone = ("not reached", "missed") if missed else ("–", "nothing")
        return MetricCell(None, words, tone=tone)
    aside, reach = "", None
    if metric.id == "throughput" and result.low is not None and result.high is not None and value:
        aside = f"±{unsigned_percent((result.high - result.low) / 2 / value)}"
        reach = (_place(metric, result.low, scale), _place(metric, result.high, scale))
    elif metric.id == "target" and result.steps_to_target is not None:
        aside = counted(result.steps_to_target, "step")
    earlier = None if old is None else _place(metric, old, scale)
    at = _place(metric, value, scale)
    return MetricCell(value, metric.words(result, value), aside, at, reach, earlier)


# What workloads are compared with: saved results, or themselves without remedies.


class ComparedCell(NamedTuple):
    """A change with its interval; places are percentages of a track with "no change" halfway."""

    value: float | None  # sorted by
    words: str
    tip: str
    tone: str  # good, bad or still
    at: float | None = None
    reach: tuple[float, float] | None = None


class ComparedColumn(NamedTuple):
    title: str
    hint: str
    cells: Mapping[str, ComparedCell]  # by the workload's key


class _Change(NamedTuple):
    """Distances from "no change", before they are put on a common scale."""

    value: float
    low: float | None
    high: float | None
    words: str
    tip: str
    tone: str


def compared_columns(
    measured: Mapping[str, WorkloadResult], comparison: BenchComparison | None
) -> list[ComparedColumn]:
    """None, one or two: against saved results, and against the same workload without remedies."""
    columns = []
    if comparison is not None:
        columns.append(_against(comparison, measured))
    speeds = {key: change for key, row in measured.items() if (change := _speed(row))}
    if speeds:
        hint = "Throughput relative to the same workload without changes, run in turns."
        columns.append(ComparedColumn("Times as fast", hint, _on_scale(speeds)))
    return columns


def earlier_rows(
    measured: Mapping[str, WorkloadResult], against: BenchResults | None
) -> dict[str, WorkloadResult]:
    """By key, the row that each is shown beside: in `against`, else the one without remedies."""

    def identity(row: WorkloadResult) -> tuple[object, ...]:
        settings = tuple(sorted((name, str(value)) for name, value in row.settings.items()))
        remedies = tuple(sorted(row.remedies)) if against else ()
        return row.name, row.size, row.ranks, settings, remedies

    rows = against.workloads if against else [r for r in measured.values() if not r.remedies]
    partners = {identity(row): row for row in rows if row.status == "measured"}
    pairs = {key: partners.get(identity(now)) for key, now in measured.items()}
    return {key: row for key, row in pairs.items() if row and row is not measured[key]}


def _against(comparison: BenchComparison, measured: Mapping[str, WorkloadResult]) -> ComparedColumn:
    """The comparison has one row for each of the results', in their order; keys are places."""
    rows = {key: comparison.workloads[int(key)] for key in measured}
    cells = _on_scale({key: change for key, row in rows.items() if (change := _change(row))})
    for key, row in rows.items():
        if key not in cells:
            tip = f"Not comparable\n{one_line(row.why or 'the reason is not known')}"
            cells[key] = ComparedCell(None, "–", tip, "still")
    hint = (
        f"Compared with {one_line(comparison.against)}, with intervals. All intervals "
        "together hold with 95% confidence."
    )
    return ComparedColumn("Step, change", hint, cells)


def _change(row: WorkloadChange) -> _Change | None:
    if row.counted_change is None:
        return None
    words = relative_change(row.counted_change)
    lines = [f"{row.verdict}: {words} ({interval_words(row)})"]
    if row.base_ms is not None and row.now_ms is not None:
        lines.append(f"{milliseconds(row.base_ms)} before, {milliseconds(row.now_ms)} now")
    if moved := moved_words(row):
        lines.append(f"mostly {one_line(moved)}")
    if parts := parts_words(row):
        lines.append(parts)
    tip = "\n".join([*lines, *map(one_line, row.notes)])
    tone = {"faster": "good", "slower": "bad"}.get(row.verdict, "still")
    return _Change(row.counted_change, row.counted_low, row.counted_high, words, tip, tone)


def _speed(row: WorkloadResult) -> _Change | None:
    """Distances are logarithms: twice and half as fast lie equally far from no change."""
    if not row.speedup:
        return None
    low, high = row.speedup_low, row.speedup_high
    sure = low is not None and high is not None and not low <= 1 <= high
    return _Change(
        math.log(row.speedup),
        math.log(low) if low else None,
        math.log(high) if high else None,
        f"{significant(row.speedup)}×",
        f"{speed_words(row)} times as fast as without {one_line(' + '.join(row.remedies))}",
        "still" if not sure else "good" if row.speedup > 1 else "bad",
    )


def _on_scale(changes: Mapping[str, _Change]) -> dict[str, ComparedCell]:
    """On one scale. An interval that is absurdly wide ends at the track's edge."""
    farthest = max((abs(change.value) for change in changes.values()), default=0.0)
    ends = [end for change in changes.values() for end in (change.low, change.high)]
    widest = max((abs(end) for end in ends if end is not None), default=0.0)
    reach = max(farthest, min(widest, 3 * farthest)) or 1.0

    def at(distance: float) -> float:
        return 50 + 48 * min(max(distance / reach, -1.0), 1.0)

    def ends_of(change: _Change) -> tuple[float, float] | None:
        if change.low is None or change.high is None:
            return None
        return at(change.low), at(change.high)

    return {
        key: ComparedCell(
            change.value, change.words, change.tip, change.tone, at(change.value), ends_of(change)
        )
        for key, change in changes.items()
    }
