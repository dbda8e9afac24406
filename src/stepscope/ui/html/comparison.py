"""Write the comparison's page: verdict, what moved, both sides' steps, parts and timelines,
charts and tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from stepscope.records.comparison import Comparison, Side
from stepscope.records.explanation import Budget, Part
from stepscope.text.figures import (
    milliseconds,
    percent,
    relative_change,
    relative_interval,
    significant,
    unsigned_percent,
)
from stepscope.ui.html.lanes import draw_pair, lanes_of_side
from stepscope.ui.html.render import render_page, slices, write_atomically
from stepscope.ui.html.svg import circle, line, rect, round_values, short_tick, text
from stepscope.ui.topics.comparison import (
    comparison_answer,
    comparison_facts,
    name_table,
    phase_name,
    phase_table,
    phases_and_rest,
    promise_sentences,
    run_table,
    signed_ms,
    whole_steps,
)
from stepscope.ui.topics.section import Cells
from stepscope.ui.words import PARTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ends = tuple[float, float]

_ROWS = 25
_WIDE = 1 << 16  # a page cuts no path


def write_comparison(comparison: Comparison, path: Path, *, cache: bool = True) -> None:
    """Where the comparison read both traces, they are read again for one step of each."""
    words = comparison_answer(comparison)
    fall, bars, pair = waterfall(comparison), _bars(comparison), None
    if comparison.budget:
        a, b = (lanes_of_side(side, cache=cache) for side in (comparison.a, comparison.b))
        pair = draw_pair(a, b) if a and b else None
    tables = [cells for cells in _tables(comparison) if cells.rows]
    sections = {
        "verdict": ("Verdict", True),
        "moved": ("What changed", fall),
        "steps": ("Steps", True),
        "parts": ("Parts", bars),
        "timelines": ("Timelines", pair),
        "tables": ("Tables", tables),
    }
    smallest = unsigned_percent(comparison.smallest_detectable)
    page = render_page(
        "comparison.html.j2",
        styles=("report.css", "calibration.css", "comparison.css"),
        scripts=["comparison"],
        title=words.verdict,
        links=[(id_, title) for id_, (title, there) in sections.items() if there],
        words=words,
        promises=promise_sentences(comparison),
        facts=[
            ("A", milliseconds(comparison.a_ms)),
            ("B", milliseconds(comparison.b_ms)),
            ("Runs", f"{len(comparison.a.runs)} and {len(comparison.b.runs)}"),
            ("Smallest change that this comparison finds", smallest),
            *(
                (fact.title, fact.page_words or fact.words)
                for fact in comparison_facts(comparison)
                if fact.title
            ),
        ],
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


def _bars(comparison: Comparison) -> dict[str, Any] | None:
    """Both steps divided, one under the other on one scale, and what each colour stands for."""
    rows = comparison.budget
    if not rows:
        return None
    steps = whole_steps(comparison)
    longest = max(steps)
    sides: list[dict[str, Any]] = []
    for name, step_ms in zip("ab", steps, strict=True):
        times = [(row.id, getattr(row, f"{name}_ms")) for row in rows]
        parts = tuple(Part(id=id_, ms=ms, share=ms / step_ms) for id_, ms in times)
        sides.append(
            {
                "name": name.upper(),
                "step": milliseconds(step_ms),
                "parts": slices(Budget(step_ms=step_ms, basis="measured", parts=parts)),
                "left_over": longest - step_ms,  # how much shorter this bar is than the longer one
            }
        )
    known = {part.label: part for side in sides for part in side["parts"]}
    about = (
        "Each side's step, split as in the trace of a few steps. The parts add up to the "
        "step and have no interval. The phases above cover all steps."
    )
    if comparison.is_as_recorded:
        about = (
            "Parts of the recorded steps: they add up to the step. The steps are too few for "
            "intervals."
        )

    def numbers(a: float, b: float) -> tuple[str, str, str]:
        return significant(a), significant(b), signed_ms(b - a)

    return {
        "title": f"Parts of the {'profiled ' if comparison.is_as_recorded else ''}step",
        "sides": sides,
        "legend": [
            (known[PARTS[row.id][0]], *numbers(row.a_ms, row.b_ms)[:2], signed_ms(row.change_ms))
            for row in rows
            if PARTS[row.id][0] in known
        ],
        "whole": ("The step", *numbers(*steps)),
        "longest": longest,
        "about": about,
    }


def _tables(comparison: Comparison) -> list[Cells]:
    phases = phases_and_rest(comparison)
    phase_cells = phase_table(comparison, phases).for_page()
    if phases:
        a, b = comparison.a_ms, comparison.b_ms
        ends = f"{signed_ms(a * comparison.low)} to {signed_ms(a * comparison.high)}"
        phase_cells.rows.append(
            ["The step", significant(a), significant(b), signed_ms(b - a), ends]
        )
    facts = [
        Cells(title, ["", "A", "B"], [[row.name, row.a or "-", row.b or "-"] for row in rows])
        for title, rows in (
            ("What changed in the step", comparison.evidence.changed),
            ("What else differs", comparison.config),
        )
    ]
    return [
        phase_cells._replace(title="Phases"),
        name_table(comparison.kernels[:_ROWS], _WIDE).for_page()._replace(title="Kernels"),
        name_table(comparison.operators[:_ROWS], _WIDE).for_page()._replace(title="Operators"),
        run_table(comparison, _WIDE).for_page()._replace(title="Runs"),
        *facts,
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
_BEYOND = 0.6  # of the waterfall's width: how far intervals may reach out of it


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


def _svg(height: int, inside: str, label: str, color: str = "") -> Markup:
    return Markup(
        f'<svg class="{color}" style="height: {height}px" role="img" '
        f'aria-label="{label}">{inside}</svg>'
    )


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
    many = 4 * scale.right / ((scale.right - scale.left) or 1.0)
    ticks = [
        text("is-middle", scale.at(ms), _HIGH + 16, short_tick(milliseconds(ms)))
        for ms in round_values(scale.right, many)
        if _EDGE <= scale.share(ms) <= 100 - _EDGE  # its words are not cut
    ]
    return _svg(_HIGH + 22, "".join([*bars, base, *ticks]), "How long steps take, A and B")


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


def _drawn_range(a: Side, b: Side) -> Ends:
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


def waterfall(comparison: Comparison) -> dict[str, Any] | None:
    """From A's step to B's: the rows' changes add up to B - A; positions are percentages.

    By phase over all measured steps; by part, without intervals, over profiled ones.
    """
    rows: list[tuple[str, float, Ends | None]] = [
        (phase_name(row), row.change_ms, (row.low_ms, row.high_ms))
        for row in phases_and_rest(comparison)
    ] or [(PARTS[x.id][0], x.change_ms, None) for x in comparison.budget if x.a_ms or x.b_ms]
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
    about = (
        "Phases of the training loop on the CPU, over all measured steps. Bars are "
        f"differences of medians with their {percent(comparison.confidence)} intervals, and "
        "what stalls add to the mean step. Pale bars are within noise. The rest makes the "
        "bars add up to B - A."
    )
    if not comparison.phases:
        which = "profiled steps" if comparison.is_as_recorded else "steps, without the profiler"
        about = f"Parts of the {which}. Too few steps were recorded for intervals."
    return {
        "a": milliseconds(comparison.a_ms),
        "b": milliseconds(comparison.b_ms),
        "a_at": scale.share(comparison.a_ms),
        "b_at": scale.share(comparison.b_ms),
        "rows": [
            _waterfall_row(label, change, between, float(ends[place]), scale)
            for place, (label, change, between) in enumerate(rows)
        ],
        "about": about,
    }


def _waterfall_row(
    label: str, change: float, between: Ends | None, start: float, scale: _Scale
) -> dict[str, Any]:
    low, high = sorted((start, start + change))
    sure = between is None or not between[0] <= 0 <= between[1]
    row: dict[str, Any] = {
        "label": label,
        "change": f"{signed_ms(change)} ms",
        "between": "",
        "tone": "still" if not sure or not change else "less" if change < 0 else "more",
        "left": scale.share(low),
        "width": max(scale.share(high) - scale.share(low), 0.3),
        "before": scale.share(start),  # where the row before ended
        "after": scale.share(start + change),
        "whisker": None,
    }
    if between is not None:
        row["between"] = f"{signed_ms(between[0])} to {signed_ms(between[1])}"
        row["whisker"] = (scale.share(start + between[0]), scale.share(start + between[1]))
    return row
