"""A step on many GPUs in a terminal: verdict, why, next; one line per GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.ui.gpus import answer, cells, columns, notes
from stepscope.ui.terminal.console import make_console, text_line
from stepscope.ui.terminal.tables import answer_grid, fitting_table

if TYPE_CHECKING:
    from stepscope.records.gpu_comparison import GpuComparison


def print_gpus(comparison: GpuComparison, about: str) -> None:
    console = make_console()
    console.print(text_line(f"{about}: recorded on {comparison.source}", style="bright_black"))
    console.print()
    console.print(answer_grid(answer(comparison)))
    console.print()
    rows = [cells(comparison, row) for row in comparison.gpus]
    spare = ("speed", "bottleneck", "95%")
    table = fitting_table("the step", columns(comparison), rows, width=console.width, spare=spare)
    for line, row in zip(table.rows, comparison.gpus, strict=True):
        if row.gpu == comparison.source_gpu:
            line.style = "bold"
        elif row.step_ms is None or row.fits is False:
            line.style = "bright_black"
    console.print(table)
    console.print()
    for note in notes(comparison):
        console.print(text_line(f"- {note}", style="bright_black"))
