"""Write the comparison's page: verdict, what moved, both sides' steps, parts and timelines,
charts and tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from stepscope.records.explanation import Budget, Part
from stepscope.text.figures import (
    milliseconds,
    percent,
    relative_change,
    relative_interval,
    signed_percent,
    significant,
    size,
    unsigned_percent,
)
from stepscope.text.words import sentence
from stepscope.ui.html.lanes import draw_pair, lanes_of_side
from stepscope.ui.html.render import render_page, slices, write_atomically
from stepscope.ui.html.svg import circle, line, rect, round_values, short_tick, text
from stepscope.ui.topics.comparison import (
    comparison_answer,
    median_words,
    open_words,
    phases_and_rest,
    profiled_words,
    promise_words,
    row_name,
    run_with_words,
    whole_steps,
)
from stepscope.ui.words import PARTS, short_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.comparison import Comparison, NameChange, PhaseChange, Side

    Floats = NDArray[np.float64]

STYLES = ("report.css", "calibration.css", "comparison.css")
_ROWS = 25
_LONGEST_NAME = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTable:
    """A table; all columns but the first are numbers, unless `numbers` is False."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: bool = True


def write_comparison(comparison: Comparison, path: Path, *, cache: bool = True) -> None:
    """Where the comparison read both traces, they are read again for one step of each."""
    words = comparison_answer(comparison)
    fall, bars, pair = waterfall(comparison), _bars(comparison), _pair(comparison, cache)
    tables = [table for table in _tables(comparison) if table.rows]
    sections = {
        "verdict": ("Verdict", True),
        "moved": ("What changed", fall),
        "steps": ("Steps", True),
        "parts": ("Parts", bars),
        "timelines": ("Timelines", pair),
        "tables": ("Tables", tables),
    }
    page = render_page(
        "comparison.html.j2",
        styles=STYLES,
        scripts=["comparison"],
        title=words.verdict,
        links=[(id_, title) for id_, (title, there) in sections.items() if there],
        words=words,
        promises=_promises(comparison),
        facts=_facts(comparison),
        fall=fall,
        confidence=percent(comparison.confidence),
        a_ms=milliseconds(comparison.a_ms),
        b_ms=milliseconds(comparison.b_ms),
        change=draw_change(comparison.low, comparison.change, comparison.high),
        spread=draw_spread(comparison.a, comparison.b),
        order=draw_order(comparison.a, comparison.b),
        bars=bars,
        pair=pair,
        profiled=comparison.is_as_recorded,
        basis=comparison.basis,
        tables=tables,
        notes=comparison.notes,
    )
    write_atomically(path, page)


def _pair(comparison: Comparison, cache: bool) -> Markup | None:
    if not comparison.budget:
        return None
    a, b = (lanes_of_side(side, cache=cache) for side in (comparison.a, comparison.b))
    return draw_pair(a, b) if a and b else None


def _promises(comparison: Comparison) -> list[tuple[str, bool]]:
    """What was promised, and whether it was delivered."""
    promise = comparison.promise
    closed = [(promise_words(promise), bool(promise.inside))] if promise else []
    return closed + [(open_words(still_open), False) for still_open in comparison.open_promises]


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    facts = [
        ("A", milliseconds(comparison.a_ms)),
        ("B", milliseconds(comparison.b_ms)),
        ("Runs", f"{len(comparison.a.runs)} and {len(comparison.b.runs)}"),
        (
            "Smallest change that this comparison finds",
            unsigned_percent(comparison.smallest_detectable),
        ),
    ]
    if run_with := run_with_words(comparison):
        facts.append(("Changes", run_with))
    if comparison.median is not None:
        facts.append(("Typical step", median_words(comparison)))
    if profiled := profiled_words(comparison):
        facts.append(("As recorded", profiled))
    if comparison.slow_steps is not None:
        slow = comparison.slow_steps
        times = f"{significant(slow.a_ms)} -> {milliseconds(slow.b_ms)}"
        ends = relative_interval(slow.low, slow.high)
        facts.append(("Slow steps, 95th percentile", f"{times} ({ends})"))
    if comparison.a_peak_bytes is not None and comparison.b_peak_bytes is not None:
        peaks = f"{size(comparison.a_peak_bytes)} -> {size(comparison.b_peak_bytes)}"
        facts.append(("Memory peak", peaks))
    return facts


def _bars(comparison: Comparison) -> dict[str, Any] | None:
    """Both steps divided, one under the other on one scale, and what each colour stands for."""
    rows = comparison.budget
    if not rows:
        return None
    steps = whole_steps(comparison)
    longest = max(steps)
    sides = (
        _budget(steps[0], [(row.id, row.a_ms) for row in rows]),
        _budget(steps[1], [(row.id, row.b_ms) for row in rows]),
    )
    known = {part.label: part for side in sides for part in slices(side)}
    return {
        "title": f"Parts of the {'profiled ' if comparison.is_as_recorded else ''}step",
        "sides": (_bar_side("A", sides[0], longest), _bar_side("B", sides[1], longest)),
        "legend": [
            {
                "part": known[PARTS[row.id][0]],
                "a": significant(row.a_ms),
                "b": significant(row.b_ms),
                "change": signed(row.change_ms),
            }
            for row in rows
            if PARTS[row.id][0] in known
        ],
        "whole": (
            "The step",
            significant(steps[0]),
            significant(steps[1]),
            signed(steps[1] - steps[0]),
        ),
        "longest": longest,
        "about": _about_bars(comparison),
    }


def _about_bars(comparison: Comparison) -> str:
    if comparison.is_as_recorded:
        return (
            "Parts of the recorded steps: they add up to the step. The steps are too few for "
            "intervals."
        )
    return (
        "Each side's step, split as in the trace of a few steps. The parts add up to the "
        "step and have no interval. The phases above cover all steps."
    )


def _budget(step_ms: float, parts: Sequence[tuple[str, float]]) -> Budget:
    return Budget(
        step_ms=step_ms,
        basis="measured",
        parts=tuple(Part(id=id_, ms=ms, share=ms / step_ms) for id_, ms in parts),
    )


def _bar_side(name: str, budget: Budget, longest: float) -> dict[str, Any]:
    """`left_over` is how much shorter this bar is than the longer one."""
    return {
        "name": name,
        "step": milliseconds(budget.step_ms),
        "parts": slices(budget),
        "left_over": longest - budget.step_ms,
    }


def _tables(comparison: Comparison) -> list[PlainTable]:
    columns = ("", "A, ms", "B, ms", "change, ms")
    named = (*columns, "calls A", "calls B")
    config = [(row.name, row.a or "-", row.b or "-") for row in comparison.config]
    changed = [(row.name, row.a or "-", row.b or "-") for row in comparison.evidence.changed]
    return [
        PlainTable(title="Phases", columns=(*columns, "interval, ms"), rows=_phases(comparison)),
        PlainTable(title="Kernels", columns=named, rows=_named(comparison.kernels)),
        PlainTable(title="Operators", columns=named, rows=_named(comparison.operators)),
        PlainTable(title="Runs", columns=_RUNS, rows=_runs(comparison)),
        PlainTable(
            title="What changed in the step", columns=("", "A", "B"), rows=changed, numbers=False
        ),
        PlainTable(title="What else differs", columns=("", "A", "B"), rows=config, numbers=False),
    ]


_RUNS = ("run", "mean, ms", "median, ms", "steps", "independent", "warm-up left out", "drift")


def _runs(comparison: Comparison) -> list[tuple[str, ...]]:
    return [
        (
            f"{name} · {run.path}{f' rank {run.rank}' if run.rank is not None else ''}",
            significant(run.mean_ms),
            significant(run.median_ms),
            str(run.steps),
            f"{run.effective_steps:.0f}",
            str(run.warm_up),
            signed_percent(run.drift) if run.drift else "-",
        )
        for name, side in (("A", comparison.a), ("B", comparison.b))
        for run in side.runs
    ]


def _phases(comparison: Comparison) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            _phase_name(row),
            significant(row.a_ms),
            significant(row.b_ms),
            signed(row.change_ms),
            f"{signed(row.low_ms)} to {signed(row.high_ms)}",
        )
        for row in phases_and_rest(comparison)
    ]
    if rows:
        a, b = comparison.a_ms, comparison.b_ms
        between = f"{signed(a * comparison.low)} to {signed(a * comparison.high)}"
        rows.append(("The step", significant(a), significant(b), signed(b - a), between))
    return rows


def _named(rows: tuple[NameChange, ...]) -> list[tuple[str, ...]]:
    return [
        (
            short_kernel(row.name, _LONGEST_NAME),
            "-" if row.a_ms is None else significant(row.a_ms),
            "-" if row.b_ms is None else significant(row.b_ms),
            signed(row.change_ms),
            "-" if row.a_calls is None else f"{row.a_calls:.4g}",
            "-" if row.b_calls is None else f"{row.b_calls:.4g}",
        )
        for row in rows[:_ROWS]
    ]


# The comparison's charts: the change, how steps are spread, and the way from A's step to B's.
#
# Positions are percentages of the width, so that charts shrink and their text does not.

A_COLOR, B_COLOR = "s-compute", "s-comm"
_BINS = 40
_UNDRAWN = 3  # percentiles at the slow end: a single step may take a hundred times as long
_EDGE = 5  # percent of the width
_HIGH = 150  # height of a chart of steps
_MARGIN = 0.12
_PHASES = {
    "data": "Data",
    "forward": "Forward",
    "backward": "Backward",
    "optimizer": "Optimizer",
    "other": "Other",
    "rest": "Rest of the step",
}
_BEYOND = 0.6  # of the waterfall's width: how far intervals may reach out of it


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallRow:
    """One row of the waterfall; positions are percentages of its width."""

    label: str
    change: str
    between: str  # the interval, in words
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
    return [
        (_phase_name(row), row.change_ms, (row.low_ms, row.high_ms))
        for row in phases_and_rest(comparison)
    ]


def _phase_name(row: PhaseChange) -> str:
    return _PHASES.get(row.id) or sentence(row_name(row.id))


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
