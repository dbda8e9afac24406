"""The comparison's charts: the change, how steps are spread, and the way from A's step to B's.

Positions are percentages of the width, so that charts shrink and their text does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from stepscope.records.figures import (
    milliseconds,
    percent,
    relative_change,
    relative_interval,
    significant,
)
from stepscope.records.words import sentence
from stepscope.ui.comparison import phases_and_rest, row_name
from stepscope.ui.html.svg import circle, line, rect, round_values, short_tick, text
from stepscope.ui.words import PARTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.comparison import Comparison, Side

    Floats = NDArray[np.float64]

A_COLOR, B_COLOR = "s-compute", "s-comm"
_BINS = 40
_UNDRAWN = 3  # percentiles at the slow end: a single step may take a hundred times as long
_EDGE = 5  # percent of the width
_HIGH = 150  # height of a chart of steps
_MARGIN = 0.12
_BEYOND = 0.6  # of the waterfall's width: how far intervals may reach out of it
PHASES = {
    "data": "Data",
    "forward": "Forward",
    "backward": "Backward",
    "optimizer": "Optimizer",
    "other": "Other",
    "rest": "Rest of the step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallRow:
    """One row of the waterfall; positions are percentages of its width."""

    label: str
    change: str
    between: str  # the interval, in words
    sure: bool  # beyond chance, or without an interval
    tone: str  # less, more, or still
    left: float
    width: float
    before: float  # where the row before ended
    after: float
    whisker: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """From A's step to B's: the rows' changes add up to B - A."""

    a: str
    b: str
    a_at: float
    b_at: float
    rows: tuple[WaterfallRow, ...]
    about: str


def draw_change(low: float, value: float, high: float) -> Markup:
    """A bar from low to high, a point, and a line at zero."""
    left, right = min(low, 0.0), max(high, 0.0)
    margin = _MARGIN * ((right - left) or 1.0)
    scale = _Scale(left - margin, right + margin)
    zero, middle = scale.at(0.0), scale.at(value)
    marks = [
        line("frame", zero, zero, 14, 112),
        text("tick", zero, 128, "no change"),
        rect("band", scale.at(low), 48, scale.wide(low, high), 24),
        line("line", scale.at(low), scale.at(high), 60, 60),
        circle("dot", middle, 60, 5),
        text("tick strong", middle, 36, relative_change(value)),
        text("tick", "50%", 148, relative_interval(low, high)),
    ]
    return _svg(156, "".join(marks), "The change and its interval", A_COLOR)


def draw_spread(a: Side, b: Side) -> Markup:
    """How many steps take how long: a histogram of each side, its step as a line."""
    scale = _Scale(*_drawn_range(a, b))
    edges = np.linspace(scale.left, scale.right, _BINS + 1)
    shares = [_shares(side, edges) for side in (a, b)]
    highest = max(float(side.max()) for side in shares) or 1.0
    bars = []
    for color, side, share in ((A_COLOR, a, shares[0]), (B_COLOR, b, shares[1])):
        inside = [
            rect("bin", f"{100 * place / _BINS:.2f}%", _HIGH - tall, f"{100 / _BINS:.2f}%", tall)
            for place, part in enumerate(share.tolist())
            if (tall := 130 * part / highest) > 0
        ]
        at = scale.at(side.ms)
        inside.append(line("middle", at, at, 4, _HIGH))
        bars.append(f'<g class="{color}">{"".join(inside)}</g>')
    base = line("frame", "0%", "100%", _HIGH, _HIGH)
    return _svg(_HIGH + 22, "".join(bars) + base + _ticks(scale), "How long steps take, A and B")


def draw_order(a: Side, b: Side) -> Markup:
    """Steps in the order they ran, and each side's step across."""
    low, high = _drawn_range(a, b)

    def y(ms: float) -> float:
        return 22 + (_HIGH - 30) * (1 - min(max((ms - low) / (high - low), 0.0), 1.0))

    groups = []
    for color, side in ((A_COLOR, a), (B_COLOR, b)):
        trail = [ms for run in side.runs for ms in run.trail_ms]
        dots = [
            circle("step", f"{100 * (place + 0.5) / len(trail):.2f}%", y(ms), 2)
            for place, ms in enumerate(trail)
        ]
        middle = line("middle", "0%", "100%", y(side.ms), y(side.ms))
        groups.append(f'<g class="{color} trail">{"".join(dots)}{middle}</g>')
    words = [
        text("", 0, _HIGH + 14, "first step"),
        text("is-end", "100%", _HIGH + 14, "last step"),
        text("", 2, 11, milliseconds(high)),
        text("", 2, _HIGH - 3, milliseconds(low)),
    ]
    frame = line("frame", "0%", "100%", _HIGH, _HIGH)
    return _svg(_HIGH + 22, frame + "".join(groups + words), "Steps in the order they ran, A and B")


def waterfall(comparison: Comparison) -> Waterfall | None:
    """By phase over all measured steps; by part, without intervals, over profiled ones."""
    rows = _measured_rows(comparison) or _profiled_rows(comparison)
    if not rows:
        return None
    changes = np.cumsum([change for _, change, _ in rows])
    ends = np.concatenate(([comparison.a_ms], comparison.a_ms + changes))
    left, right = float(ends.min()), float(ends.max())
    margin = _MARGIN * ((right - left) or 0.01 * comparison.a_ms)
    scale = _Scale(left - margin, right + margin)
    room = _BEYOND * (scale.right - scale.left)
    reach = [ends[i] + end for i, (_, _, ends_ms) in enumerate(rows) for end in ends_ms or ()]
    near = [x for x in reach if scale.left - room <= x <= scale.right + room]
    # An interval that ends at the frame goes on beyond it; the others end within.
    edge = 0.01 * (scale.right - scale.left)
    scale = _Scale(min([scale.left, *near]) - edge, max([scale.right, *near]) + edge)
    return Waterfall(
        a=milliseconds(comparison.a_ms),
        b=milliseconds(comparison.b_ms),
        a_at=scale.share(comparison.a_ms),
        b_at=scale.share(comparison.b_ms),
        rows=tuple(
            _waterfall_row(label, change, between, float(ends[place]), scale)
            for place, (label, change, between) in enumerate(rows)
        ),
        about=_about(comparison),
    )


_Change = tuple[str, float, tuple[float, float] | None]  # label, ms, interval


def _measured_rows(comparison: Comparison) -> list[_Change]:
    rows = phases_and_rest(comparison)
    names = [PHASES.get(row.id) or sentence(row_name(row.id)) for row in rows]
    return [
        (name, row.change_ms, (row.low_ms, row.high_ms))
        for name, row in zip(names, rows, strict=True)
    ]


def _profiled_rows(comparison: Comparison) -> list[_Change]:
    return [(PARTS[x.id][0], x.change_ms, None) for x in comparison.budget if x.a_ms or x.b_ms]


def _about(comparison: Comparison) -> str:
    if not comparison.phases:
        which = "profiled steps" if comparison.is_as_recorded else "steps, without the profiler"
        return f"Parts of the {which}. Too few steps were recorded for intervals."
    return (
        "Phases of the training loop on the CPU, over all measured steps. Bars are "
        f"differences of medians with their {percent(comparison.confidence)} intervals, and "
        "what stalls add to the mean step. Pale bars are within noise. The rest makes the "
        "bars add up to B - A."
    )


def _waterfall_row(
    label: str, change: float, between: tuple[float, float] | None, start: float, scale: _Scale
) -> WaterfallRow:
    ends = sorted((start, start + change))
    sure = between is None or not between[0] <= 0 <= between[1]
    return WaterfallRow(
        label=label,
        change=f"{signed(change)} ms",
        between="" if between is None else f"{signed(between[0])} to {signed(between[1])}",
        sure=sure,
        tone="still" if not sure or not change else "less" if change < 0 else "more",
        left=scale.share(ends[0]),
        width=max(scale.share(ends[1]) - scale.share(ends[0]), 0.3),
        before=scale.share(start),
        after=scale.share(start + change),
        whisker=None
        if between is None
        else (scale.share(start + between[0]), scale.share(start + between[1])),
    )


def signed(ms: float) -> str:
    """With its sign; what is not worth three digits is 0."""
    return "0" if abs(ms) < 5e-4 else f"{'+' if ms > 0 else ''}{significant(ms)}"


class _Scale:
    """Numbers to percentages of the width, never beyond its ends."""

    def __init__(self, left: float, right: float) -> None:
        self.left, self.right = left, right

    def share(self, value: float) -> float:
        place = (value - self.left) / ((self.right - self.left) or 1.0)
        return 100 * min(max(place, 0.0), 1.0)

    def at(self, value: float) -> str:
        return f"{self.share(value):.2f}%"

    def wide(self, low: float, high: float) -> str:
        return f"{max(self.share(high) - self.share(low), 0.3):.2f}%"


def _drawn_range(a: Side, b: Side) -> tuple[float, float]:
    """Without the slowest few percent, which would leave no room for the rest."""
    drawn = (*a.quantiles_ms[: -1 - _UNDRAWN], *b.quantiles_ms[: -1 - _UNDRAWN])
    margin = 0.04 * (max(drawn) - min(drawn)) or 0.01 * max(drawn)
    return max(min(drawn) - margin, 0.0), max(drawn) + margin


def _shares(side: Side, edges: Floats) -> Floats:
    """Share of all steps between neighbouring edges, from percentiles: as exact as these."""
    levels = np.linspace(0.0, 1.0, len(side.quantiles_ms))
    below = np.interp(edges, side.quantiles_ms, levels, left=0.0, right=1.0)
    shares: Floats = np.diff(below)
    return shares


def _ticks(scale: _Scale) -> str:
    many = 4 * scale.right / ((scale.right - scale.left) or 1.0)
    return "".join(
        text("is-middle", scale.at(ms), _HIGH + 16, short_tick(milliseconds(ms)))
        for ms in round_values(scale.right, many)
        if _EDGE <= scale.share(ms) <= 100 - _EDGE  # its words are not cut
    )


def _svg(height: int, inside: str, label: str, color: str = "") -> Markup:
    return Markup(
        f'<svg class="{color}" style="height: {height}px" role="img" '
        f'aria-label="{label}">{inside}</svg>'
    )
