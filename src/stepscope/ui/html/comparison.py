"""The comparison's page: the interval, both distributions, and what moved. It draws only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup

from stepscope.ui.comparison import (
    interval,
    open_words,
    percent,
    promise_words,
    whole_steps,
    words_of,
)
from stepscope.ui.html.report import _source, _write_atomically, sentence
from stepscope.ui.words import PARTS, size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.records.comparison import Comparison, MovedName

_WIDTH, _HEIGHT = 440, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 400, 12, 168
_MIDDLE = 70  # of the picture of the change
_MARGIN = 0.12
_ROWS = 25
_UNDRAWN = 3  # percentiles at the slow end: a single step may take a hundred times as long
_CSS = ".moved { margin: 18px 0 6px; font-size: 14px; }\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A table; all columns but the first are numbers unless it says otherwise."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: bool = True


def write_comparison(comparison: Comparison, path: Path) -> None:
    """One file that needs nothing else, whole or not at all."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["sentence"] = sentence
    style = _source("report.css") + _source("calibration.css") + _CSS
    page = environment.from_string(_source("comparison.html.j2")).render(
        words=words_of(comparison),
        facts=_facts(comparison),
        confidence=f"{comparison.confidence:.0%}",
        change=draw_change(comparison.low, comparison.change, comparison.high),
        shares=draw_shares(comparison.a.quantiles_ms, comparison.b.quantiles_ms),
        tables=[table for table in _tables(comparison) if table.rows],
        notes=comparison.notes,
        style=Markup(style),
    )
    _write_atomically(path, page)


def draw_change(low: float, value: float, high: float) -> Markup:
    """A bar from low to high, a point, and a line at zero."""
    left, right = min(low, 0.0), max(high, 0.0)
    margin = _MARGIN * ((right - left) or 1.0)

    def x(share: float) -> float:
        return _place(share, left - margin, right + margin)

    marks = [
        f'<path class="frame" d="M{x(0):.1f} 20V{_MIDDLE + 40}"/>',
        f'<text class="tick" x="{x(0):.1f}" y="{_MIDDLE + 56}">no change</text>',
        f'<rect class="band" x="{x(low):.1f}" y="{_MIDDLE - 12}" '
        f'width="{max(x(high) - x(low), 1):.1f}" height="24"/>',
        f'<path class="line" d="M{x(low):.1f} {_MIDDLE}H{x(high):.1f}"/>',
        f'<circle class="dot" cx="{x(value):.1f}" cy="{_MIDDLE}" r="5"/>',
        f'<text class="tick" x="{x(value):.1f}" y="{_MIDDLE - 22}">{percent(value, sign=True)}'
        "</text>",
        f'<text class="tick" x="{_WIDTH / 2}" y="{_MIDDLE + 84}">{interval(low, high)}</text>',
    ]
    return _svg(170, "s-compute", "".join(marks), "The change and its interval")


def draw_shares(a: tuple[float, ...], b: tuple[float, ...]) -> Markup:
    """For every length, the share of steps that are shorter: two rising lines."""
    drawn = (*a[: -1 - _UNDRAWN], *b[: -1 - _UNDRAWN])
    left, right = min(drawn), max(drawn)
    if left == right:
        left, right = left * 0.99, right * 1.01
    lines = []
    for share in (0.0, 0.5, 1.0):
        y = _up(share)
        lines.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>')
        lines.append(f'<text class="level" x="{_LEFT - 6}" y="{y:.1f}">{share:.0%}</text>')
    for part in (0.0, 0.5, 1.0):
        ms = left + part * (right - left)
        x = _place(ms, left, right)
        lines.append(f'<text class="tick" x="{x:.1f}" y="{_BOTTOM + 18}">{ms:.4g} ms</text>')
    for color, quantiles in (("s-compute", a), ("s-comm", b)):
        points = [
            f"{_place(ms, left, right):.1f} {_up(place / (len(quantiles) - 1)):.1f}"
            for place, ms in enumerate(quantiles)
            if ms <= right
        ]
        lines.append(f'<g class="{color}"><path class="line" d="M{"L".join(points)}"/></g>')
    return _svg(_HEIGHT, "", "".join(lines), "Share of steps that are shorter, A and B")


def _place(value: float, left: float, right: float) -> float:
    return _LEFT + (value - left) / (right - left) * (_RIGHT - _LEFT)


def _up(share: float) -> float:
    return _BOTTOM - share * (_BOTTOM - _TOP)


def _svg(height: int, color: str, inside: str, label: str) -> Markup:
    return Markup(
        f'<svg class="{color}" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{label}">{inside}</svg>'
    )


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    facts = [
        ("A", f"{comparison.a_ms:.2f} ms"),
        ("B", f"{comparison.b_ms:.2f} ms"),
        ("Runs", f"{len(comparison.a.runs)} and {len(comparison.b.runs)}"),
        ("Smallest change that would be found", percent(comparison.smallest_detectable)),
    ]
    if comparison.slow_steps is not None:
        slow = comparison.slow_steps
        told = f"{slow.a_ms:.2f} -> {slow.b_ms:.2f} ms ({interval(slow.low, slow.high)})"
        facts.append(("Slow steps, 95th percentile", told))
    if comparison.a_peak_bytes is not None and comparison.b_peak_bytes is not None:
        told = f"{size(comparison.a_peak_bytes)} -> {size(comparison.b_peak_bytes)}"
        facts.append(("Memory peak", told))
    if comparison.promise is not None:
        facts.append(("Promise", promise_words(comparison.promise)))
    facts += [("Promise", open_words(each)) for each in comparison.open_promises]
    return facts


def _tables(comparison: Comparison) -> list[Rows]:
    columns = ("", "A, ms", "B, ms", "change, ms")
    parts = [
        (PARTS[row.id][0], f"{row.a_ms:.3f}", f"{row.b_ms:.3f}", f"{row.change_ms:+.3f}")
        for row in comparison.budget
        if row.a_ms or row.b_ms
    ]
    if parts:
        a, b = whole_steps(comparison)
        parts.append(("The step", f"{a:.3f}", f"{b:.3f}", f"{b - a:+.3f}"))
    profiled = "profiled " if comparison.steps_are == "profiled" else ""
    phases = [
        (
            row.id,
            f"{row.a_ms:.3f}",
            f"{row.b_ms:.3f}",
            f"{row.change_ms:+.3f}",
            f"{row.low_ms:+.3f} to {row.high_ms:+.3f}",
        )
        for row in comparison.phases
    ]
    config = [(row.name, row.a or "-", row.b or "-") for row in comparison.config]
    named = (*columns, "calls A", "calls B")
    return [
        Rows(title=f"Parts of the {profiled}step", columns=columns, rows=parts),
        Rows(title="Phases on the host", columns=(*columns, "interval, ms"), rows=phases),
        Rows(title="Kernels", columns=named, rows=_named(comparison.kernels)),
        Rows(title="Operators", columns=named, rows=_named(comparison.operators)),
        Rows(title="What else differs", columns=("", "A", "B"), rows=config, numbers=False),
    ]


def _named(rows: tuple[MovedName, ...]) -> list[tuple[str, ...]]:
    return [
        (
            row.name,
            "-" if row.a_ms is None else f"{row.a_ms:.3f}",
            "-" if row.b_ms is None else f"{row.b_ms:.3f}",
            f"{row.change_ms:+.3f}",
            "-" if row.a_calls is None else f"{row.a_calls:.4g}",
            "-" if row.b_calls is None else f"{row.b_calls:.4g}",
        )
        for row in rows[:_ROWS]
    ]
