"""A bench against saved results in a terminal: the verdict, one row per workload, what to know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.records.figures import relative_change, significant
from stepscope.ui.bench.against_words import (
    against_answer,
    against_notes,
    interval_words,
    moved_words,
)
from stepscope.ui.bench.words import row_name
from stepscope.ui.terminal.console import make_console, note_line
from stepscope.ui.terminal.tables import answer_grid, fitting_table
from stepscope.ui.words import or_dash

if TYPE_CHECKING:
    from stepscope.records.bench_comparison import BenchComparison, WorkloadChange

_COLUMNS = ("workload", ">base ms", ">now ms", ">change", ">interval", "moved", "against the base")
_SPARE = ("moved", "base ms", "now ms", "interval")


def print_against(comparison: BenchComparison, *, width: int | None = None) -> None:
    """Everything, to stdout."""
    console = make_console(width)
    verdicts = {change.verdict for change in comparison.workloads}
    style = "bold red" if "slower" in verdicts else "bold"
    console.print()
    console.print(answer_grid(against_answer(comparison), style))
    console.print()
    rows = [_cells(change) for change in comparison.workloads]
    console.print(fitting_table("", _COLUMNS, rows, width=console.width, spare=_SPARE))
    console.print()
    for note in against_notes(comparison):
        console.print(note_line(note), soft_wrap=True)


def _cells(change: WorkloadChange) -> list[str]:
    return [
        row_name(change),
        or_dash(change.base_ms, significant),
        or_dash(change.now_ms, significant),
        or_dash(change.counted_change, relative_change),
        interval_words(change),
        moved_words(change) or "-",
        change.verdict,
    ]
