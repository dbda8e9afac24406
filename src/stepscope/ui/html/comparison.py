"""The comparison's page: verdict, what moved, both sides' steps, parts and timelines, tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepscope.records.explanation import Budget, Part
from stepscope.records.figures import (
    milliseconds,
    percent,
    relative_interval,
    signed_percent,
    significant,
    size,
    unsigned_percent,
)
from stepscope.records.words import sentence
from stepscope.ui.comparison import (
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
from stepscope.ui.html.comparison_charts import (
    PHASES,
    draw_change,
    draw_order,
    draw_spread,
    signed,
    waterfall,
)
from stepscope.ui.html.parts import slices
from stepscope.ui.html.render import render_page, write_atomically
from stepscope.ui.html.step_lanes import draw_pair, lanes_of_side
from stepscope.ui.words import PARTS, short_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from markupsafe import Markup

    from stepscope.records.comparison import Comparison, NameChange

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
            PHASES.get(row.id) or sentence(row_name(row.id)),
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
