"""The comparison's charts: the change, how steps are spread, and the way from A's step to B's.

Places are percentages of the width, so that charts shrink and their words do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from stepscope.records.figures import milliseconds, signed_percent
from stepscope.ui.comparison import change_interval
from stepscope.ui.words import PARTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.comparison import Comparison, Side

    Floats = NDArray[np.float64]

A_COLOR, B_COLOR = "s-compute", "s-comm"
_BINS = 40
_UNDRAWN = 3  # percentiles at the slow end: a single step may take a hundred times as long
_HIGH = 150  # of a chart of steps
_MARGIN = 0.12
_BEYOND = 0.6  # how far intervals may reach out of the waterfall, of its width
PHASES = {
    "data": "Data",
    "forward": "Forward",
    "backward": "Backward",
    "optimizer": "Optimizer",
    "other": "Other",
    "rest": "Rest of the step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """One row of the waterfall; places are percentages of its width."""

    label: str
    change: str
    between: str  # the interval, in words
    sure: bool  # beyond chance; without an interval nobody says otherwise
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
    rows: tuple[Fall, ...]
    about: str


def draw_change(low: float, value: float, high: float) -> Markup:
    """A bar from low to high, a point, and a line at zero."""
    left, right = min(low, 0.0), max(high, 0.0)
    margin = _MARGIN * ((right - left) or 1.0)
    scale = _Scale(left - margin, right + margin)
    zero, middle = scale.at(0.0), scale.at(value)
    band = f'x="{scale.at(low)}" width="{scale.wide(low, high)}"'
    marks = [
        f'<line class="frame" x1="{zero}" x2="{zero}" y1="14" y2="112"/>',
        f'<text class="tick" x="{zero}" y="128">no change</text>',
        f'<rect class="band" {band} y="48" height="24"/>',
        f'<line class="line" x1="{scale.at(low)}" x2="{scale.at(high)}" y1="60" y2="60"/>',
        f'<circle class="dot" cx="{middle}" cy="60" r="5"/>',
        f'<text class="tick strong" x="{middle}" y="36">{signed_percent(value)}</text>',
        f'<text class="tick" x="50%" y="148">{change_interval(low, high)}</text>',
    ]
    return _svg(156, "".join(marks), "The change and its interval", A_COLOR)


def draw_spread(a: Side, b: Side) -> Markup:
    """How many steps take how long: a histogram of each side, its median as a line."""
    scale = _Scale(*_drawn_range(a, b))
    edges = np.linspace(scale.left, scale.right, _BINS + 1)
    shares = [_shares(side, edges) for side in (a, b)]
    highest = max(float(side.max()) for side in shares) or 1.0
    bars = []
    for color, side, share in ((A_COLOR, a, shares[0]), (B_COLOR, b, shares[1])):
        inside = [
            f'<rect class="bin" x="{100 * place / _BINS:.2f}%" width="{100 / _BINS:.2f}%" '
            f'y="{_HIGH - 130 * part / highest:.1f}" height="{130 * part / highest:.1f}"/>'
            for place, part in enumerate(share.tolist())
            if part > 0
        ]
        at = scale.at(side.ms)
        inside.append(f'<line class="median" x1="{at}" x2="{at}" y1="4" y2="{_HIGH}"/>')
        bars.append(f'<g class="{color}">{"".join(inside)}</g>')
    base = f'<line class="frame" x1="0%" x2="100%" y1="{_HIGH}" y2="{_HIGH}"/>'
    return _svg(_HIGH + 22, "".join(bars) + base + _ticks(scale), "How long steps take, A and B")


def draw_order(a: Side, b: Side) -> Markup:
    """Steps in the order they ran, and each side's median across."""
    low, high = _drawn_range(a, b)

    def y(ms: float) -> float:
        return 22 + (_HIGH - 30) * (1 - min(max((ms - low) / (high - low), 0.0), 1.0))

    out = []
    for color, side in ((A_COLOR, a), (B_COLOR, b)):
        trail = [ms for run in side.runs for ms in run.trail_ms]
        dots = [
            f'<circle cx="{100 * (place + 0.5) / len(trail):.2f}%" cy="{y(ms):.1f}" r="2"/>'
            for place, ms in enumerate(trail)
        ]
        line = (
            f'<line class="median" x1="0%" x2="100%" y1="{y(side.ms):.1f}" y2="{y(side.ms):.1f}"/>'
        )
        out.append(f'<g class="{color} trail">{"".join(dots)}{line}</g>')
    words = [
        f'<text x="0" y="{_HIGH + 14}">first step</text>',
        f'<text x="100%" y="{_HIGH + 14}" text-anchor="end">last step</text>',
        f'<text x="2" y="11">{milliseconds(high)}</text>',
        f'<text x="2" y="{_HIGH - 3}">{milliseconds(low)}</text>',
    ]
    frame = f'<line class="frame" x1="0%" x2="100%" y1="{_HIGH}" y2="{_HIGH}"/>'
    return _svg(_HIGH + 22, frame + "".join(out + words), "Steps in the order they ran, A and B")


def waterfall(comparison: Comparison) -> Waterfall | None:
    """By phase over all measured steps; of profiled steps by part, which has no interval."""
    rows = _measured_rows(comparison) or _profiled_rows(comparison)
    if not rows:
        return None
    ends = np.concatenate(([comparison.a_ms], comparison.a_ms + np.cumsum([x[1] for x in rows])))
    left, right = float(ends.min()), float(ends.max())
    margin = _MARGIN * ((right - left) or 0.01 * comparison.a_ms)
    scale = _Scale(left - margin, right + margin)
    room = _BEYOND * (scale.right - scale.left)
    reach = [(ends[i] + x[2][j]) for i, x in enumerate(rows) if x[2] for j in (0, 1)]
    near = [x for x in reach if scale.left - room <= x <= scale.right + room]
    scale = _Scale(min([scale.left, *near]), max([scale.right, *near]))
    return Waterfall(
        a=milliseconds(comparison.a_ms),
        b=milliseconds(comparison.b_ms),
        a_at=scale.share(comparison.a_ms),
        b_at=scale.share(comparison.b_ms),
        rows=tuple(
            _fall(label, change, between, float(ends[place]), scale)
            for place, (label, change, between) in enumerate(rows)
        ),
        about=_about(comparison),
    )


_Row = tuple[str, float, tuple[float, float] | None]


def _measured_rows(comparison: Comparison) -> list[_Row]:
    moved = (*comparison.phases, *((comparison.rest,) if comparison.rest else ()))
    return [(PHASES.get(x.id, x.id), x.change_ms, (x.low_ms, x.high_ms)) for x in moved]


def _profiled_rows(comparison: Comparison) -> list[_Row]:
    return [(PARTS[x.id][0], x.change_ms, None) for x in comparison.budget if x.a_ms or x.b_ms]


def _about(comparison: Comparison) -> str:
    if not comparison.phases:
        return "Parts of the profiled steps; there are too few of them for intervals."
    return (
        "Phases of the training loop on the host, over all measured steps: differences of medians "
        f"with their {comparison.confidence:.0%} intervals. Pale: within chance. The rest is what "
        "medians of phases leave of the median step (pauses that hit now one phase, now another), "
        "so that all of it adds up to B - A."
    )


def _fall(
    label: str, change: float, between: tuple[float, float] | None, start: float, scale: _Scale
) -> Fall:
    ends = sorted((start, start + change))
    sure = between is None or not between[0] <= 0 <= between[1]
    return Fall(
        label=label,
        change=f"{round(change, 2) + 0.0:+.2f} ms",
        between="" if between is None else f"{between[0]:+.2f} to {between[1]:+.2f}",
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
    """Of all steps, between neighbouring edges; by percentiles, so as exact as one in a hundred."""
    levels = np.linspace(0.0, 1.0, len(side.quantiles_ms))
    below = np.interp(edges, side.quantiles_ms, levels, left=0.0, right=1.0)
    shares: Floats = np.diff(below)
    return shares


def _ticks(scale: _Scale) -> str:
    out = []
    for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        ms = scale.left + part * (scale.right - scale.left)
        out.append(
            f'<text x="{100 * part:g}%" y="{_HIGH + 16}" text-anchor="{anchor}">'
            f"{milliseconds(ms)}</text>"
        )
    return "".join(out)


def _svg(height: int, inside: str, label: str, color: str = "") -> Markup:
    return Markup(
        f'<svg class="{color}" style="height: {height}px" role="img" '
        f'aria-label="{label}">{inside}</svg>'
    )
