"""Show the workloads of a bench side by side: one row each, one small chart per metric, and
what they are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchMetric:
    """A column. Amounts that differ by powers of ten lie on a logarithmic scale, as dots."""

    id: str
    title: str
    hint: str
    value: Callable[[WorkloadResult], float | None]
    words: Callable[[WorkloadResult, float], str]
    logarithmic: bool = False
    whole: float | None = None  # what a full bar stands for; None: the largest value


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricCell:
    """A value of one workload; places are percentages of the track's width."""

    value: float | None  # sorted by; None is not known
    words: str
    aside: str = ""  # smaller, behind the words
    at: float | None = None
    reach: tuple[float, float] | None = None
    before: float | None = None
    tone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
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


METRICS = (
    BenchMetric(
        id="throughput",
        title="Throughput",
        hint="Samples a second of the whole job, with its 95% interval.",
        value=lambda row: row.samples_per_s,
        words=_throughput,
        logarithmic=True,
    ),
    BenchMetric(
        id="step",
        title="Step",
        hint="Mean of all runs, without start-up. Explain and serve show one run.",
        value=lambda row: row.step_ms,
        words=lambda _, ms: milliseconds(ms),
        logarithmic=True,
    ),
    BenchMetric(
        id="busy",
        title="Device busy",
        hint="Share of the step in which the device works.",
        value=lambda row: row.busy,
        words=lambda _, share: percent(share),
        whole=1.0,
    ),
    BenchMetric(
        id="mfu",
        title="MFU",
        hint="Model FLOPs utilization: the model's arithmetic as a share of the device's peak.",
        value=lambda row: row.mfu,
        words=lambda _, share: percent(share),
        whole=1.0,
    ),
    BenchMetric(
        id="cpu",
        title="CPU",
        hint="CPU time divided by wall time and cores.",
        value=lambda row: row.cpu,
        words=lambda _, share: percent(share),
        whole=1.0,
    ),
    BenchMetric(
        id="memory",
        title="Peak memory",
        hint="The most bytes allocated at once.",
        value=lambda row: row.peak_bytes,
        words=lambda _, held: size(held),
    ),
    BenchMetric(
        id="target",
        title="Time to target",
        hint="Training time until the loss reaches the workload's target, without start-up.",
        value=lambda row: row.time_to_target_s,
        words=lambda _, seconds: long_duration(seconds * 1e9),
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
    abouts = distinctions(list(measured.values()))
    return [
        BenchRow(
            key=key,
            name=short_name(result.name),
            about=about,
            verdict=sentence(one_line(result.verdict or "")),
            tip=describe(result),
            cells=tuple(
                _cell(metric, result, before.get(key), scale)
                for metric, scale in zip(metrics, scales, strict=True)
            ),
            compared=tuple(column.cells.get(key) for column in compared),
        )
        for (key, result), about in zip(measured.items(), abouts, strict=True)
    ]


def distinctions(results: Sequence[WorkloadResult]) -> list[str]:
    """Per workload its size, ranks, remedies and settings, each only where rows differ in it."""
    remedied = any(result.remedies for result in results)
    facts = [
        (
            result.size,
            counted(result.ranks, "rank"),
            " + ".join(result.remedies) or ("unchanged" if remedied else ""),
        )
        for result in results
    ]
    differ = [len(set(column)) > 1 for column in zip(*facts, strict=True)]
    varied = _varied_settings(results)
    return [
        " · ".join(
            one_line(word)
            for word in (
                *(word for word, told in zip(row, differ, strict=True) if told and word),
                *(f"{name} {result.settings.get(name, '–')}" for name in varied[result.name]),
            )
        )
        for row, result in zip(facts, results, strict=True)
    ]


def _varied_settings(results: Sequence[WorkloadResult]) -> dict[str, list[str]]:
    """By workload, the settings in which its rows of one size differ."""
    seen: dict[str, dict[str, dict[str, set[str]]]] = {}
    for result in results:
        for name, value in result.settings.items():
            by_size = seen.setdefault(result.name, {}).setdefault(name, {})
            by_size.setdefault(result.size, set()).add(str(value))
    varied: dict[str, list[str]] = {result.name: [] for result in results}
    for workload, settings in seen.items():
        varied[workload] = [
            name
            for name, by_size in settings.items()
            if any(len(values) > 1 for values in by_size.values())
        ]
    return varied


def short_name(name: str) -> str:
    plain = one_line(name)
    return plain if len(plain) <= _LONGEST_NAME else f"{plain[: _LONGEST_NAME - 1]}…"


def describe(result: WorkloadResult) -> str:
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
        lines.append(_throughput(result, result.samples_per_s) + _between(result))
    if result.runs_ms:
        runs = ", ".join(map(significant, result.runs_ms))
        lines.append(f"{counted(len(result.runs_ms), 'run')}, mean step each: {runs} ms")
    if result.predicted_peak_bytes is not None:
        lines.append(f"peak memory predicted before the run: {size(result.predicted_peak_bytes)}")
    shares = {**result.compute_share, **result.counters}
    lines += [f"{one_line(name)}: {percent(share)}" for name, share in shares.items()]
    lines += [one_line(note) for note in (result.verdict or "", *result.notes) if note]
    return "\n".join(map(sentence, lines))


def _between(result: WorkloadResult) -> str:
    if result.low is None or result.high is None:
        return ""
    return f" ({interval(result.low, result.high)})"


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
    return _at_least_tenfold(min(positive), max(positive))


def _at_least_tenfold(low: float, high: float) -> Scale:
    """Values that are nearly equal must not lie at opposite ends."""
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
        return MetricCell(
            value=None,
            words="not reached" if missed else "–",
            tone="missed" if missed else "nothing",
        )
    aside, reach = "", None
    if metric.id == "throughput" and result.low is not None and result.high is not None and value:
        aside = f"±{unsigned_percent((result.high - result.low) / 2 / value)}"
        reach = (_place(metric, result.low, scale), _place(metric, result.high, scale))
    elif metric.id == "target" and result.steps_to_target is not None:
        aside = counted(result.steps_to_target, "step")
    return MetricCell(
        value=value,
        words=metric.words(result, value),
        aside=aside,
        at=_place(metric, value, scale),
        reach=reach,
        before=None if old is None else _place(metric, old, scale),
    )


# What workloads are compared with: saved results, or themselves without remedies.


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedCell:
    """A change with its interval; places are percentages of a track with "no change" halfway."""

    value: float | None  # sorted by
    words: str
    tip: str
    tone: str  # good, bad or still
    at: float | None = None
    reach: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedColumn:
    title: str
    hint: str
    cells: Mapping[str, ComparedCell]  # by the workload's key


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
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
        columns.append(ComparedColumn(title="Times as fast", hint=hint, cells=_on_scale(speeds)))
    return columns


def earlier_rows(
    measured: Mapping[str, WorkloadResult], against: BenchResults | None
) -> dict[str, WorkloadResult]:
    """By key, the row that each is shown beside: in `against`, else the one without remedies."""
    rows = against.workloads if against else [r for r in measured.values() if not r.remedies]
    partners = {_identity(row, against): row for row in rows if row.status == "measured"}
    pairs = {key: partners.get(_identity(now, against)) for key, now in measured.items()}
    return {key: row for key, row in pairs.items() if row and row is not measured[key]}


def _identity(row: WorkloadResult, against: BenchResults | None) -> tuple[object, ...]:
    settings = tuple(sorted((name, str(value)) for name, value in row.settings.items()))
    return row.name, row.size, row.ranks, settings, tuple(sorted(row.remedies)) if against else ()


def _against(comparison: BenchComparison, measured: Mapping[str, WorkloadResult]) -> ComparedColumn:
    """The comparison has one row for each of the results', in their order; keys are places."""
    rows = {key: comparison.workloads[int(key)] for key in measured}
    cells = _on_scale({key: change for key, row in rows.items() if (change := _change(row))})
    for key, row in rows.items():
        if key not in cells:
            tip = f"Not comparable\n{one_line(row.why or 'the reason is not known')}"
            cells[key] = ComparedCell(value=None, words="–", tip=tip, tone="still")
    return ComparedColumn(
        title="Step, change",
        hint=f"Compared with {one_line(comparison.against)}, with intervals. All intervals "
        "together hold with 95% confidence.",
        cells=cells,
    )


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
    return _Change(
        value=row.counted_change,
        low=row.counted_low,
        high=row.counted_high,
        words=words,
        tip="\n".join([*lines, *map(one_line, row.notes)]),
        tone={"faster": "good", "slower": "bad"}.get(row.verdict, "still"),
    )


def _speed(row: WorkloadResult) -> _Change | None:
    """Distances are logarithms: twice and half as fast lie equally far from no change."""
    if not row.speedup:
        return None
    low, high = row.speedup_low, row.speedup_high
    sure = low is not None and high is not None and not low <= 1 <= high
    return _Change(
        value=math.log(row.speedup),
        low=math.log(low) if low else None,
        high=math.log(high) if high else None,
        words=f"{significant(row.speedup)}×",
        tip=f"{speed_words(row)} times as fast as without {one_line(' + '.join(row.remedies))}",
        tone="still" if not sure else "good" if row.speedup > 1 else "bad",
    )


def _on_scale(changes: Mapping[str, _Change]) -> dict[str, ComparedCell]:
    """On one scale. An interval that is absurdly wide ends at the track's edge."""
    farthest = max((abs(change.value) for change in changes.values()), default=0.0)
    widest = max((abs(end) for change in changes.values() for end in _ends(change)), default=0.0)
    reach = max(farthest, min(widest, 3 * farthest)) or 1.0

    def at(distance: float) -> float:
        return 50 + 48 * min(max(distance / reach, -1.0), 1.0)

    return {
        key: ComparedCell(
            value=change.value,
            words=change.words,
            tip=change.tip,
            tone=change.tone,
            at=at(change.value),
            reach=None
            if change.low is None or change.high is None
            else (at(change.low), at(change.high)),
        )
        for key, change in changes.items()
    }


def _ends(change: _Change) -> Iterable[float]:
    return [end for end in (change.low, change.high) if end is not None]
