"""What workloads are compared with: saved results, or themselves without remedies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.records.figures import milliseconds, relative_change, significant
from stepscope.ui.bench.against_words import interval_words, moved_words, parts_words
from stepscope.ui.bench.words import speed_words
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stepscope.records.bench_comparison import BenchComparison, WorkloadChange
    from stepscope.records.bench_result import BenchResults, WorkloadResult


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
