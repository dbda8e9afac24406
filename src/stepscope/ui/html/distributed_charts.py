"""Charts about several ranks, as SVG: who came last, and bandwidth against message size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from stepscope.explain.collectives import bus_factor
from stepscope.records import figures
from stepscope.records.figures import duration, trimmed
from stepscope.records.words import counted, plural
from stepscope.ui.distributed import group_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.job import Job, JobCollective, LastArriver

MOST_BARS = 12
MOST_DOTS = 400
_WIDTH = 600
_LEAST_ROW, _MOST_ROW = 23, 40
_ROOM = 300  # for all rows of arrivals
# Across: the rank, how often it was last, what it waited.
_LAST, _LAST_END = 74, 214
_WAIT, _WAIT_END = 416, 526
_HEAD = 26
# Of the plot of bandwidths.
_HEIGHT = 312
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 586, 10, 274
_SHAPES = ("circle", "diamond", "square", "triangle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One kind of collective in groups of one purpose, for the legend."""

    kind: str
    label: str
    mark: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    small: float
    large: float
    slow: float
    fast: float

    def x(self, size_bytes: float) -> float:
        return _place(_LEFT, _RIGHT, size_bytes, self.small, self.large)

    def y(self, gb_s: float) -> float:
        return _place(_BOTTOM, _TOP, gb_s, self.slow, self.fast)


def draw_arrivals(job: Job) -> tuple[Markup, str]:
    """Bars of those who came last most often, and a sentence about the ranks left out."""
    rows = job.arrivals[: MOST_BARS if len(job.arrivals) > MOST_BARS + 4 else None]
    rest = job.arrivals[len(rows) :]
    if not any(row.times_last for row in rows):
        return Markup(""), ""
    accused = {each.rank for each in job.stragglers.ranks}
    most = max(row.times_last for row in rows)
    longest = max((row.waits_ns for row in job.arrivals), default=0)
    parts = [
        _text("tick", _LAST, 14, "arrived last"),
        _text("tick", _WAIT, 14, "waited for others, per step"),
    ]
    step = max(_LEAST_ROW, min(_MOST_ROW, _ROOM // len(rows)))
    for place, row in enumerate(rows):
        top = _HEAD + place * step
        parts.append(_arrival(row, top, step, most, longest, row.rank in accused))
    height = _HEAD + len(rows) * step
    return _svg(height, "How often each rank arrived last", parts), _left_out(rest)


def _arrival(row: LastArriver, y: int, height: int, most: int, longest: int, accused: bool) -> str:
    last = (_LAST_END - _LAST) * row.times_last / most
    waits = (_WAIT_END - _WAIT) * row.waits_ns / longest if longest else 0.0
    told = f"{row.times_last:,} of {row.of:,}" + (
        f", by {duration(row.lead_ns)}" if row.times_last else ""
    )
    marked = " is-accused" if accused else ""
    middle = y + height / 2
    return (
        f'<g class="arrival{marked}"><title>rank {row.rank}: last to arrive in '
        f"{row.times_last:,} of "
        f"{counted(row.of, 'collective')}, typically by {duration(row.lead_ns)}; waited "
        f"{duration(row.waits_ns)} per step itself</title>"
        f'<rect class="hit" x="0" y="{y}" width="{_WIDTH}" height="{height}"/>'
        + _text("who", _LAST - 10, middle, f"rank {row.rank}")
        + _bar("last", _LAST, middle, last)
        + _text("value", _LAST + last + 7, middle, told)
        + _bar("waits", _WAIT, middle, waits)
        + _text("value", _WAIT + waits + 7, middle, duration(row.waits_ns))
        + "</g>"
    )


def _left_out(rest: Sequence[LastArriver]) -> str:
    if not rest:
        return ""
    last = sum(row.times_last for row in rest)
    if not last:
        return f"{_others(rest)} never last by more than the clock's error bar."
    return f"{_others(rest)} last {counted(last, 'time')} in total."


def _others(rest: Sequence[LastArriver]) -> str:
    return f"The other {counted(len(rest), 'rank')} {plural(len(rest), 'was', 'were')}"


def draw_bandwidth(job: Job) -> tuple[Markup, list[Series]]:
    """A dot for each kind, group and size; the calibrated rate as a dashed line."""
    known = [row for row in job.collectives if row.size_bytes and row.busbw_gb_s][:MOST_DOTS]
    if not known:
        return Markup(""), []
    axes = _axes(known)
    accused = {each.group for each in job.stragglers.ranks if each.group is not None}
    series: dict[tuple[str, str], list[JobCollective]] = {}
    for row in known:
        series.setdefault((row.kind, _purpose(row)), []).append(row)
    parts = [_grid(axes)]
    legend = []
    for place, ((kind, _), rows) in enumerate(series.items()):
        shape = _SHAPES[place % len(_SHAPES)]
        parts.append(f'<g class="k-{escape(kind)}">{_curves(rows, axes)}')
        parts += [_dot(shape, row, axes, row.group in accused) for row in rows]
        parts.append("</g>")
        legend.append(_series(kind, shape, rows))
    return _svg(_HEIGHT, "Bandwidth against message size", parts), legend


def _purpose(row: JobCollective) -> str:
    return row.description or (counted(row.group_size, "rank") if row.group_size else "?")


def _series(kind: str, shape: str, rows: Sequence[JobCollective]) -> Series:
    groups = len({row.group for row in rows})
    size = rows[0].group_size
    name = rows[0].description or f"group {rows[0].group}"
    ranks = counted(size, "rank") if size is not None else "? ranks"
    many = f"{groups} groups of {ranks}" if groups > 1 else ranks
    return Series(
        kind=kind, label=f"{kind}, {name}, {many}", mark=Markup(_mark(shape, "dot", 7, 7))
    )


def _axes(rows: Sequence[JobCollective]) -> _Axes:
    sizes = [row.size_bytes or 1 for row in rows]
    rates = [row.busbw_gb_s or 0.0 for row in rows]
    rates += [rate for row in rows if (rate := _expected_rate(row)) is not None]
    small, large = _at_least(min(sizes), max(sizes), 16.0)
    slow, fast = _at_least(min(rates), max(rates), 8.0)
    return _Axes(small=small, large=large, slow=slow, fast=fast)


def _at_least(low: float, high: float, factor: float) -> tuple[float, float]:
    """Both ends, with a margin and so far apart that equal values do not look different."""
    margin = max(1.5, math.sqrt(factor * low / high)) if high < factor * low else 1.5
    return low / margin, high * margin


def _expected_rate(row: JobCollective) -> float | None:
    if not row.expected_ns or not row.size_bytes or (row.group_size or 0) < 2:
        return None
    return row.size_bytes * bus_factor(row.kind, row.group_size or 0) / row.expected_ns


def _curves(rows: Sequence[JobCollective], axes: _Axes) -> str:
    """Through the calibrated rates of the sizes seen; of one size alone, a dash."""
    points = sorted(
        {(row.size_bytes or 1, rate) for row in rows if (rate := _expected_rate(row)) is not None}
    )
    if not points:
        return ""
    places = [(axes.x(size), axes.y(rate)) for size, rate in points]
    if len(places) == 1:
        (x, y) = places[0]
        places = [(max(_LEFT, x - 26), y), (min(_RIGHT, x + 26), y)]
    return _path("expected", places)


def _dot(shape: str, row: JobCollective, axes: _Axes, accused: bool) -> str:
    size, rate = row.size_bytes or 1, row.busbw_gb_s or 0.0
    took = (row.transfer_ns or 0) / row.count
    unsure = row.wait_error_ns is not None and took < row.wait_error_ns / row.count
    words = [
        f"{row.kind}, group {group_words(row)}: {figures.size(size)}, {counted(row.count, 'time')}",
        f"busbw {rate:.2f} GB/s, a transfer {duration(took)}",
    ]
    if row.expected_ns:
        words.append(f"calibrated {duration(row.expected_ns)}")
    if unsure:
        words.append("shorter than the clock's error bar")
    mark = _mark(shape, "dot is-unsure" if unsure else "dot", axes.x(size), axes.y(rate))
    if accused:
        x, y = axes.x(size), axes.y(rate)
        mark += f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="9"/>'
        mark += _text("accused", x + 14, y, f"group {row.group}: slow link")
    return f"<g>{mark}<title>{escape('; '.join(words))}</title></g>"


def _mark(shape: str, name: str, x: float, y: float) -> str:
    if shape == "circle":
        return f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="4.6"/>'
    corners = {
        "square": ((-4.2, -4.2), (4.2, -4.2), (4.2, 4.2), (-4.2, 4.2)),
        "diamond": ((0, -5.8), (5.8, 0), (0, 5.8), (-5.8, 0)),
        "triangle": ((0, -5.4), (5.4, 4.2), (-5.4, 4.2)),
    }[shape]
    points = "L".join(f"{x + dx:.1f} {y + dy:.1f}" for dx, dy in corners)
    return f'<path class="{name}" d="M{points}Z"/>'


def _grid(axes: _Axes) -> str:
    parts = []
    for size in _levels(axes.small, axes.large, most=7):
        x = axes.x(size)
        parts.append(_path("grid", [(x, _TOP), (x, _BOTTOM)]))
        parts.append(_text("tick is-middle", x, _BOTTOM + 18, trimmed(figures.size(size))))
    for rate in _levels(axes.slow, axes.fast, most=6):
        y = axes.y(rate)
        parts.append(_path("grid", [(_LEFT, y), (_RIGHT, y)]))
        parts.append(_text("level", _LEFT - 8, y, f"{rate:g}"))
    parts.append(_path("frame", [(_LEFT, _TOP), (_LEFT, _BOTTOM), (_RIGHT, _BOTTOM)]))
    parts.append(_text("level is-unit", _RIGHT, _HEIGHT - 9, "message size"))
    parts.append(_text("unit", _LEFT + 6, _TOP + 8, "bus bandwidth, GB/s"))
    return "".join(parts)


def _levels(low: float, high: float, most: int) -> list[float]:
    """1, 2 and 5 of each power of ten, or fewer of them where that would be too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]
        if len(found) <= most:
            return found
    return found[:: -(-len(found) // most)]


def _place(start: float, end: float, value: float, low: float, high: float) -> float:
    return start + (end - start) * math.log(value / low) / math.log(high / low)


def _svg(height: float, title: str, parts: Sequence[str]) -> Markup:
    """Numbers, fixed words and escaped names only."""
    return Markup(
        f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{title}">'
        f"{''.join(parts)}</svg>"
    )


def _bar(name: str, x: float, middle: float, width: float) -> str:
    return (
        f'<rect class="bar-{name}" x="{x}" y="{middle - 7.5}" width="{max(width, 1):.1f}" '
        'height="15" rx="2"/>'
    )


def _text(name: str, x: float, y: float, text: str) -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _path(name: str, points: Sequence[tuple[float, float]]) -> str:
    return f'<path class="{name}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'
