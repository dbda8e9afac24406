"""Charts about several ranks: who arrives last, and bandwidth against message size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from stepscope.explain.collectives import bus_factor
from stepscope.records.figures import duration, rate, size
from stepscope.records.words import counted, plural
from stepscope.ui.distributed import group_words, own_wait_words, rank_on_host
from stepscope.ui.html.svg import LogAxes, circle, drawing, log_levels, path, rect, short_tick, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.job import Job, JobCollective, LastArriver

MOST_BARS = 12
MOST_DOTS = 400
_WIDTH = 600
_LEAST_ROW, _MOST_ROW = 23, 40
_ROOM = 300  # for all rows of arrivals
# Across: the rank, how often it was last, how long it waited.
_LAST, _LAST_END = 74, 190
_WAIT, _WAIT_END = 372, 458
_HEAD = 26
# The plot of bandwidths.
_HEIGHT = 312
_LEFT, _RIGHT = 58, 586
_SHAPES = ("circle", "diamond", "square", "triangle")


@dataclass(frozen=True, slots=True, kw_only=True)
class LegendEntry:
    """One kind of collective in groups of one purpose."""

    kind: str
    label: str
    mark: Markup


def draw_arrivals(job: Job) -> tuple[Markup, str]:
    """Bars for the ranks that arrived last most often; a sentence about the ranks left out."""
    rows = job.arrivals[: MOST_BARS if len(job.arrivals) > MOST_BARS + 4 else None]
    rest = job.arrivals[len(rows) :]
    if not any(row.times_last for row in rows):
        return Markup(""), ""
    accused = set(job.stragglers.accused)
    most = max(row.times_last for row in rows)
    longest = max((row.waits_ns for row in job.arrivals), default=0)
    parts = [
        text("tick", _LAST, 14, "arrived last"),
        text("tick", _WAIT, 14, "waited for others, per step"),
    ]
    step = max(_LEAST_ROW, min(_MOST_ROW, _ROOM // len(rows)))
    for place, row in enumerate(rows):
        top = _HEAD + place * step
        who = rank_on_host(row.rank, job)
        parts.append(_arrival(row, who, top, step, most, longest, row.rank in accused))
    height = _HEAD + len(rows) * step
    return drawing(_WIDTH, height, "How often each rank arrived last", parts), _left_out(rest)


def _arrival(
    row: LastArriver, who: str, y: int, height: int, most: int, longest: int, accused: bool
) -> str:
    last = (_LAST_END - _LAST) * row.times_last / most
    waits = (_WAIT_END - _WAIT) * row.waits_ns / longest if longest else 0.0
    lead = f", by {duration(row.lead_ns)}" if row.times_last else ""
    marked = " is-accused" if accused else ""
    middle = y + height / 2
    return (
        f'<g class="arrival{marked}"><title>{escape(who)}: last to arrive in '
        f"{row.times_last:,} of "
        f"{counted(row.of, 'collective')}, typically by {duration(row.lead_ns)}; waited "
        f"{own_wait_words(row)} per step itself</title>"
        + rect("hit", 0, y, _WIDTH, height)
        + text("who", _LAST - 10, middle, f"rank {row.rank}")
        + _bar("last", _LAST, middle, last)
        + text("value", _LAST + last + 7, middle, f"{row.times_last:,} of {row.of:,}{lead}")
        + _bar("waits", _WAIT, middle, waits)
        + text("value", _WAIT + waits + 7, middle, own_wait_words(row))
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


def draw_bandwidth(job: Job) -> tuple[Markup, list[LegendEntry]]:
    """A dot for each kind, group and size; the calibrated rate as a dashed line."""
    known = [row for row in job.collectives if row.size_bytes and row.busbw_gb_s][:MOST_DOTS]
    if not known:
        return Markup(""), []
    axes = _axes(known)
    accused = {slow.group for slow in job.stragglers.ranks if slow.group is not None}
    series: dict[tuple[str, str], list[JobCollective]] = {}
    for row in known:
        series.setdefault((row.kind, _purpose(row)), []).append(row)
    parts = _grid(axes)
    legend = []
    for place, ((kind, _), rows) in enumerate(series.items()):
        shape = _SHAPES[place % len(_SHAPES)]
        parts.append(f'<g class="k-{escape(kind)}">{_curves(rows, axes)}')
        parts += [_dot(shape, row, axes, row.group in accused) for row in rows]
        parts.append("</g>")
        legend.append(_legend_entry(kind, shape, rows))
    return drawing(_WIDTH, _HEIGHT, "Bandwidth against message size", parts), legend


def _purpose(row: JobCollective) -> str:
    return row.description or (counted(row.group_size, "rank") if row.group_size else "?")


def _legend_entry(kind: str, shape: str, rows: Sequence[JobCollective]) -> LegendEntry:
    groups = len({row.group for row in rows})
    members = rows[0].group_size
    name = rows[0].description or f"group {rows[0].group}"
    ranks = counted(members, "rank") if members is not None else "? ranks"
    many = f"{groups} groups of {ranks}" if groups > 1 else ranks
    return LegendEntry(
        kind=kind, label=f"{kind}, {name}, {many}", mark=Markup(_mark(shape, "dot", 7, 7))
    )


def _axes(rows: Sequence[JobCollective]) -> LogAxes:
    sizes = [row.size_bytes or 1 for row in rows]
    rates = [row.busbw_gb_s or 0.0 for row in rows]
    rates += [expected for row in rows if (expected := _expected_rate(row)) is not None]
    small, large = _at_least(min(sizes), max(sizes), 16.0)
    slow, fast = _at_least(min(rates), max(rates), 8.0)
    box = {"left": _LEFT, "right": _RIGHT, "top": 10, "bottom": 274}
    return LogAxes(**box, x_low=small, x_high=large, y_low=slow, y_high=fast)


def _at_least(low: float, high: float, factor: float) -> tuple[float, float]:
    """Both ends with a margin, at least `factor` apart: equal values must not look different."""
    margin = max(1.5, math.sqrt(factor * low / high)) if high < factor * low else 1.5
    return low / margin, high * margin


def _expected_rate(row: JobCollective) -> float | None:
    if not row.expected_ns or not row.size_bytes or (row.group_size or 0) < 2:
        return None
    return row.size_bytes * bus_factor(row.kind, row.group_size or 0) / row.expected_ns


def _curves(rows: Sequence[JobCollective], axes: LogAxes) -> str:
    """Through the calibrated rates of the sizes seen; a dash where there is only one size."""
    points = sorted(
        {
            (row.size_bytes or 1, expected)
            for row in rows
            if (expected := _expected_rate(row)) is not None
        }
    )
    if not points:
        return ""
    places = [(axes.x(bytes_), axes.y(expected)) for bytes_, expected in points]
    if len(places) == 1:
        ((x, y),) = places
        places = [(max(_LEFT, x - 26), y), (min(_RIGHT, x + 26), y)]
    return path("expected", places)


def _dot(shape: str, row: JobCollective, axes: LogAxes, accused: bool) -> str:
    x, y = axes.x(row.size_bytes or 1), axes.y(row.busbw_gb_s or 0.0)
    took = (row.transfer_ns or 0) / row.count
    unsure = row.wait_error_ns is not None and took < row.wait_error_ns / row.count
    words = [
        f"{row.kind}, group {group_words(row)}: {size(row.size_bytes or 1)}, "
        f"{counted(row.count, 'time')}",
        f"busbw {rate(1e9 * (row.busbw_gb_s or 0.0), 'B/s')}, a transfer {duration(took)}",
    ]
    if row.expected_ns:
        words.append(f"calibrated {duration(row.expected_ns)}")
    if unsure:
        words.append("shorter than the clock's error bar")
    mark = _mark(shape, "dot is-unsure" if unsure else "dot", x, y)
    if accused:
        mark += circle("ring", x, y, 9)
        mark += text("accused", x + 14, y, f"group {row.group}: slow link")
    return f"<g>{mark}<title>{escape('; '.join(words))}</title></g>"


def _mark(shape: str, kind: str, x: float, y: float) -> str:
    if shape == "circle":
        return circle(kind, x, y, 4.6)
    corners = {
        "square": ((-4.2, -4.2), (4.2, -4.2), (4.2, 4.2), (-4.2, 4.2)),
        "diamond": ((0, -5.8), (5.8, 0), (0, 5.8), (-5.8, 0)),
        "triangle": ((0, -5.4), (5.4, 4.2), (-5.4, 4.2)),
    }[shape]
    return path(kind, [(x + dx, y + dy) for dx, dy in corners], closed=True)


def _grid(axes: LogAxes) -> list[str]:
    sizes = log_levels(axes.x_low, axes.x_high, most=7)
    rates = log_levels(axes.y_low, axes.y_high, most=6)
    return [
        *axes.grid_x(sizes, lambda value: short_tick(size(value))),
        *axes.grid_y(rates, lambda value: f"{value:g}"),
        *axes.frame(_HEIGHT, "message size", "bus bandwidth, GB/s"),
    ]


def _bar(kind: str, x: float, middle: float, width: float) -> str:
    return rect(f"bar-{kind}", x, middle - 7.5, max(width, 1), 15, rx=2)
