"""The page of a bench: all workloads side by side, on one roofline, and as curves."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from stepscope.bench.against import compare_results
from stepscope.ui.bench.against_words import against_answer, against_notes
from stepscope.ui.bench.words import bench_answer, rerun_words, row_name
from stepscope.ui.html.bench_changes import compared_columns, earlier_rows
from stepscope.ui.html.bench_head import machine_facts, rules_words, when_words
from stepscope.ui.html.bench_roofline import draw_bench_roofline
from stepscope.ui.html.bench_rows import bench_rows, distinctions, short_name, shown_metrics
from stepscope.ui.html.bench_scaling import scaling_figures
from stepscope.ui.html.bench_stacks import budget_chart, loss_rows, memory_chart
from stepscope.ui.html.bench_table import numbers_table
from stepscope.ui.html.render import json_block, render_page, write_atomically
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from stepscope.records.bench_comparison import BenchComparison
    from stepscope.records.bench_result import BenchResults, WorkloadResult

STYLES = ("report.css", "efficiency.css", "memory.css", "bench.css")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmeasuredWorkload:
    name: str
    about: str
    status: str
    why: str


def write_bench_page(
    results: BenchResults,
    path: Path,
    against: BenchResults | None = None,
    comparison: BenchComparison | None = None,
) -> None:
    """`against`: saved results that each workload is shown beside.

    `comparison` is of both, where it has been made already.
    """
    if against is not None and comparison is None:
        comparison = compare_results(against, results, "the saved results")
    measured = {
        str(place): result
        for place, result in enumerate(results.workloads)
        if result.status == "measured"
    }
    view = _view(results, measured, against, comparison)
    sections = {
        "workloads": ("Workloads", view["rows"]),
        "roofline": ("Roofline", view["roofline"]),
        "budget": ("Step", view["budget"]),
        "memory": ("Memory", view["memory"]),
        "losses": ("Losses", view["losses"]),
        "scaling": ("Scaling", view["scaling"]),
        "tables": ("Numbers", view["rows"]),
    }
    page = render_page(
        "bench_page.html.j2",
        styles=STYLES,
        scripts=["bench_page"],
        title=view["answer"].verdict,
        links=[(id_, title) for id_, (title, there) in sections.items() if there],
        **view,
    )
    write_atomically(path, page)


def _view(
    results: BenchResults,
    measured: Mapping[str, WorkloadResult],
    against: BenchResults | None,
    comparison: BenchComparison | None,
) -> dict[str, Any]:
    before = earlier_rows(measured, against)
    compared = compared_columns(measured, comparison)
    rows = bench_rows(measured, before, compared)
    return {
        "answer": bench_answer(results),
        "facts": _facts(results, against),
        "rules": rules_words(results),
        "broken": [one_line(rule) for rule in results.broken_rules],
        "command": shlex.join(map(one_line, results.command)),
        "unmeasured": _unmeasured(results),
        "metrics": shown_metrics(list(measured.values())),
        "rows": rows,
        "compared": compared,
        "before": "" if not before else "before" if against else "without changes",
        "against": against_answer(comparison) if comparison else None,
        "against_tone": _against_tone(comparison),
        "against_notes": list(map(one_line, against_notes(comparison))) if comparison else [],
        "notes": [
            f"{one_line(row_name(row))}: {one_line(note)}"
            for row in measured.values()
            for note in row.notes
        ],
        "again": rerun_words(results),
        "verdicts": any(row.verdict for row in rows),
        "roofline": draw_bench_roofline(measured, results.machine),
        "budget": budget_chart(measured),
        "memory": memory_chart(measured),
        "losses": loss_rows(measured),
        "scaling": scaling_figures(results.scaling),
        "data": Markup(
            json_block({"tables": [numbers_table(measured, _changes(measured, comparison))]})
        ),
    }


def _against_tone(comparison: BenchComparison | None) -> str:
    verdicts = {row.verdict for row in comparison.workloads} if comparison else set()
    return "bad" if "slower" in verdicts else "good" if "faster" in verdicts else "still"


def _changes(
    measured: Mapping[str, WorkloadResult], comparison: BenchComparison | None
) -> dict[str, float | None]:
    if comparison is None:
        return {}
    return {key: comparison.workloads[int(key)].counted_change for key in measured}


def _facts(results: BenchResults, against: BenchResults | None) -> list[tuple[str, str]]:
    facts = machine_facts(results.machine) if results.machine else []
    facts.append(("Measured", when_words(results.started_unix)))
    if against is not None:
        facts.append(("Compared with results of", when_words(against.started_unix)))
    facts.append(("stepscope", one_line(results.stepscope)))
    return facts


def _unmeasured(results: BenchResults) -> list[UnmeasuredWorkload]:
    abouts = distinctions(results.workloads)
    return [
        UnmeasuredWorkload(
            name=short_name(result.name),
            about=about or one_line(result.size),
            status=result.status,
            why=one_line(result.why or "the reason is not known"),
        )
        for result, about in zip(results.workloads, abouts, strict=True)
        if result.status != "measured"
    ]
