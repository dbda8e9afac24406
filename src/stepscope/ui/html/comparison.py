"""The comparison's page: verdict, what moved, both sides' steps, parts and timelines, tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup

from stepscope.records.explanation import Budget, Part
from stepscope.records.figures import (
    milliseconds,
    signed_percent,
    significant,
    size,
    unsigned_percent,
)
from stepscope.ui.comparison import (
    change_interval,
    comparison_answer,
    open_words,
    promise_words,
    whole_steps,
)
from stepscope.ui.html.comparison_charts import (
    PHASES,
    draw_change,
    draw_order,
    draw_spread,
    waterfall,
)
from stepscope.ui.html.parts import Slice, slices
from stepscope.ui.html.report import (
    _csp_hash,
    _script,
    _source,
    _write_atomically,
    format_ms,
    format_percent,
    sentence,
)
from stepscope.ui.html.step_lanes import draw_pair, lanes_of_side
from stepscope.ui.words import PARTS, short_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.records.comparison import Comparison, NameChange

STYLES = ("report.css", "calibration.css", "comparison.css")
SCRIPTS = ("palette.js", "theme.js", "comparison.js")
_ROWS = 25
_LONGEST_NAME = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A table; all columns but the first are numbers unless it says otherwise."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BarSide:
    """A's or B's bar; `left_over` is what it is shorter than the longer one."""

    name: str
    step: str
    parts: list[Slice]
    left_over: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BarRow:
    """What one colour of the bars stands for."""

    part: Slice
    a: str
    b: str
    change: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Both steps divided, one under the other on one scale."""

    title: str
    sides: tuple[BarSide, BarSide]
    legend: list[BarRow]
    whole: tuple[str, str, str, str]  # the last row: the steps
    longest: float
    about: str


def write_comparison(comparison: Comparison, path: Path, *, cache: bool = True) -> None:
    """One file that needs nothing else, whole or not at all.

    Where the comparison read both traces, they are read again for a step of each.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["sentence"] = sentence
    environment.filters["ms"] = format_ms
    environment.filters["percent"] = format_percent
    script = _script(SCRIPTS)
    page = environment.from_string(_source("comparison.html.j2")).render(
        words=comparison_answer(comparison),
        promises=_promises(comparison),
        facts=_facts(comparison),
        fall=waterfall(comparison),
        confidence=f"{comparison.confidence:.0%}",
        a_ms=milliseconds(comparison.a_ms),
        b_ms=milliseconds(comparison.b_ms),
        change=draw_change(comparison.low, comparison.change, comparison.high),
        spread=draw_spread(comparison.a, comparison.b),
        order=draw_order(comparison.a, comparison.b),
        bars=_bars(comparison),
        pair=_pair(comparison, cache),
        profiled=comparison.steps_are == "profiled",
        tables=[table for table in _tables(comparison) if table.rows],
        notes=comparison.notes,
        style=Markup("".join(map(_source, STYLES))),
        script=Markup(script),
        script_hash=_csp_hash(script),
    )
    _write_atomically(path, page)


def _pair(comparison: Comparison, cache: bool) -> Markup | None:
    if not comparison.budget:
        return None
    a, b = (lanes_of_side(side, cache=cache) for side in (comparison.a, comparison.b))
    return draw_pair(a, b) if a and b else None


def _promises(comparison: Comparison) -> list[tuple[str, bool]]:
    kept = comparison.promise
    told = [(promise_words(kept), bool(kept.inside))] if kept else []
    return told + [(open_words(each), False) for each in comparison.open_promises]


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    facts = [
        ("A", milliseconds(comparison.a_ms)),
        ("B", milliseconds(comparison.b_ms)),
        ("Runs", f"{len(comparison.a.runs)} and {len(comparison.b.runs)}"),
        ("Smallest change that would be found", unsigned_percent(comparison.smallest_detectable)),
    ]
    if comparison.slow_steps is not None:
        slow = comparison.slow_steps
        told = f"{slow.a_ms:.2f} -> {slow.b_ms:.2f} ms ({change_interval(slow.low, slow.high)})"
        facts.append(("Slow steps, 95th percentile", told))
    if comparison.a_peak_bytes is not None and comparison.b_peak_bytes is not None:
        told = f"{size(comparison.a_peak_bytes)} -> {size(comparison.b_peak_bytes)}"
        facts.append(("Memory peak", told))
    return facts


def _bars(comparison: Comparison) -> Bars | None:
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
    return Bars(
        title=f"Parts of the {_profiled(comparison)}step",
        sides=(
            _bar_side("A", sides[0], longest),
            _bar_side("B", sides[1], longest),
        ),
        legend=[
            BarRow(
                part=known[PARTS[row.id][0]],
                a=f"{row.a_ms:.3f}",
                b=f"{row.b_ms:.3f}",
                change=f"{row.change_ms:+.3f}",
            )
            for row in rows
            if PARTS[row.id][0] in known
        ],
        whole=(
            "The step",
            f"{steps[0]:.3f}",
            f"{steps[1]:.3f}",
            f"{steps[1] - steps[0]:+.3f}",
        ),
        longest=longest,
        about=_about_bars(comparison),
    )


def _about_bars(comparison: Comparison) -> str:
    if comparison.steps_are == "profiled":
        return (
            "The recorded steps, divided: the parts add up to them. They are too few for intervals."
        )
    return (
        "Each side's step, as the verdict names it, divided as a trace of a few steps says: the "
        "parts add up to it and have no interval. The phases above are of all steps."
    )


def _budget(step_ms: float, parts: Sequence[tuple[str, float]]) -> Budget:
    return Budget(
        step_ms=step_ms,
        basis="measured",
        parts=tuple(Part(id=id_, ms=ms, share=ms / step_ms) for id_, ms in parts),
    )


def _bar_side(name: str, budget: Budget, longest: float) -> BarSide:
    return BarSide(
        name=name,
        step=milliseconds(budget.step_ms),
        parts=slices(budget),
        left_over=longest - budget.step_ms,
    )


def _profiled(comparison: Comparison) -> str:
    return "profiled " if comparison.steps_are == "profiled" else ""


def _tables(comparison: Comparison) -> list[Rows]:
    columns = ("", "A, ms", "B, ms", "change, ms")
    named = (*columns, "calls A", "calls B")
    config = [(row.name, row.a or "-", row.b or "-") for row in comparison.config]
    changed = [(row.name, row.a or "-", row.b or "-") for row in comparison.evidence.changed]
    return [
        Rows(title="Phases", columns=(*columns, "interval, ms"), rows=_phases(comparison)),
        Rows(title="Kernels", columns=named, rows=_named(comparison.kernels)),
        Rows(title="Operators", columns=named, rows=_named(comparison.operators)),
        Rows(title="Runs", columns=_RUNS, rows=_runs(comparison)),
        Rows(title="What changed in the step", columns=("", "A", "B"), rows=changed, numbers=False),
        Rows(title="What else differs", columns=("", "A", "B"), rows=config, numbers=False),
    ]


_RUNS = ("run", "median, ms", "steps", "independent", "warm-up left out", "drift")


def _runs(comparison: Comparison) -> list[tuple[str, ...]]:
    return [
        (
            f"{name} · {run.path}{f' rank {run.rank}' if run.rank is not None else ''}",
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
    moved = (*comparison.phases, *((comparison.rest,) if comparison.rest else ()))
    rows: list[tuple[str, ...]] = [
        (
            PHASES.get(row.id, row.id),
            f"{row.a_ms:.3f}",
            f"{row.b_ms:.3f}",
            f"{row.change_ms:+.3f}",
            f"{row.low_ms:+.3f} to {row.high_ms:+.3f}",
        )
        for row in moved
    ]
    if rows:
        a, b = comparison.a_ms, comparison.b_ms
        between = f"{a * comparison.low:+.3f} to {a * comparison.high:+.3f}"
        rows.append(("The step", f"{a:.3f}", f"{b:.3f}", f"{b - a:+.3f}", between))
    return rows


def _named(rows: tuple[NameChange, ...]) -> list[tuple[str, ...]]:
    return [
        (
            short_kernel(row.name, _LONGEST_NAME),
            "-" if row.a_ms is None else f"{row.a_ms:.3f}",
            "-" if row.b_ms is None else f"{row.b_ms:.3f}",
            f"{row.change_ms:+.3f}",
            "-" if row.a_calls is None else f"{row.a_calls:.4g}",
            "-" if row.b_calls is None else f"{row.b_calls:.4g}",
        )
        for row in rows[:_ROWS]
    ]
