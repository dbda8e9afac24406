"""Print predictions: verdict, why, next; the step without and with the change, and the step
on many GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from stepscope.records.prediction import GpuComparison, Prediction
from stepscope.ui.terminal.console import (
    FAINT,
    answer_grid,
    fitting_table,
    labelled_grid,
    make_console,
    print_blocks,
    text_line,
)
from stepscope.ui.topics.gpus import gpu_table, gpus_answer, gpus_notes
from stepscope.ui.topics.whatif import Tried, Verdict, step_table
from stepscope.ui.words import Answer

_STYLES = {"faster": "bold green", "slower": "bold red", "no difference": "bold yellow"}


def print_predictions(
    tried: Tried,
    *,
    headline: str,
    answer: Answer,
    judged: Verdict,
    assumptions: Iterable[str] = (),
    on_host: bool = False,
) -> None:
    """One prediction of all changes together, or of each change by itself, the best first."""
    console = make_console()
    blocks: list[RenderableType] = [
        text_line(headline, style=FAINT),
        answer_grid(answer, _STYLES[judged]),
        _steps_table(tried.before, tried.predictions, console.width, on_host=on_host),
    ]
    for title, lines in (("assumptions", assumptions), ("not predicted", tried.refused)):
        if distinct := dict.fromkeys(lines):
            grid = labelled_grid(gap=1)
            for line in distinct:
                grid.add_row("-", line)
            blocks.append(Group(text_line(title, style="bold"), grid))
    print_blocks(console, *blocks)


def _steps_table(
    before: Prediction, changed: Sequence[Prediction], width: int, *, on_host: bool
) -> Table:
    """The step without any change first: a prediction has to be better than that."""
    steps = (before, *changed)
    left_out = ["CPU", "GPU", "bottleneck"] if on_host else []
    if all(step.peak_bytes is None for step in steps):
        left_out.append("peak memory")
    cells = step_table(steps).for_terminal(*left_out)
    title = "one change at a time" if len(changed) > 1 else "the step"
    spare = ("CPU", "GPU", "bottleneck", "peak memory")
    table = fitting_table(title, cells.columns, cells.rows, width=width, spare=spare)
    table.rows[0].style = FAINT
    return table


def print_gpus(comparison: GpuComparison, about: str) -> None:
    """Verdict, why, next; one line per GPU."""
    console = make_console()
    cells = gpu_table(comparison).for_terminal()
    table = fitting_table(*cells, width=console.width, spare=("speed", "bottleneck", "95%"))
    for line, row in zip(table.rows, comparison.gpus, strict=True):
        if row.gpu == comparison.source_gpu:
            line.style = "bold"
        elif row.step_ms is None or row.fits is False:
            line.style = FAINT
    headline = text_line(f"{about}: recorded on {comparison.source}", style=FAINT)
    print_blocks(console, headline, answer_grid(gpus_answer(comparison)), table)
    console.print()
    for note in gpus_notes(comparison):
        console.print(text_line(f"- {note}", style=FAINT))
