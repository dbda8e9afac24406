"""Print predictions: verdict, why, next; the step without and with the change, and the step
on many GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from stepscope.records.prediction import GpuComparison, Prediction
from stepscope.text.figures import factor, interval, milliseconds, significant
from stepscope.ui.terminal.console import (
    answer_grid,
    fitting_table,
    labelled_grid,
    make_console,
    text_line,
)
from stepscope.ui.topics.gpus import answer, cells, columns, notes
from stepscope.ui.topics.whatif import BOUND, Tried, Verdict, decides, memory_words
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
    sections = [
        text_line(headline, style="bright_black"),
        answer_grid(answer, _STYLES[judged]),
        _steps_table(tried.before, tried.predictions, console.width, on_host=on_host),
        *_lists(assumptions, tried.refused),
    ]
    console.print(sections[0])
    for section in sections[1:]:
        console.print()
        console.print(section)


def _steps_table(
    before: Prediction, changed: Sequence[Prediction], width: int, *, on_host: bool
) -> Table:
    """The step without any change first: a prediction has to be better than that."""
    columns = ["", ">step", ">95%", ">samples/s"]
    if not on_host:
        columns += [">CPU", ">GPU", "bottleneck"]
    with_memory = any(step.peak_bytes is not None for step in (before, *changed))
    if with_memory:
        columns.append(">peak memory")
    rows = []
    for prediction in (before, *changed):
        cells = [
            _name(prediction),
            milliseconds(prediction.predicted_ms),
            interval(prediction.low_ms, prediction.high_ms),
            f"{factor(prediction.throughput_factor)}x",
        ]
        if not on_host:
            host, device = prediction.host_ms, prediction.device_ms
            cells += [significant(host), significant(device)]
            cells.append(BOUND[decides(prediction.typical_ms, host, device)])
        if with_memory:
            cells.append(memory_words(prediction))
        rows.append(cells)
    title = "one change at a time" if len(changed) > 1 else "the step"
    spare = ("CPU", "GPU", "bottleneck", "peak memory")
    table = fitting_table(title, columns, rows, width=width, spare=spare)
    table.rows[0].style = "bright_black"
    return table


def _name(prediction: Prediction) -> str:
    if len(prediction.settings) > 1:
        return "all together"
    return str(prediction.settings[0]) if prediction.settings else "no change"


def _lists(assumptions: Iterable[str], refused: Iterable[str]) -> list[RenderableType]:
    sections: list[RenderableType] = []
    for title, lines in (("assumptions", assumptions), ("not predicted", refused)):
        distinct = dict.fromkeys(lines)
        if distinct:
            grid = labelled_grid(gap=1)
            for line in distinct:
                grid.add_row("-", line)
            sections.append(Group(text_line(title, style="bold"), grid))
    return sections


# A step on many GPUs in a terminal: verdict, why, next; one line per GPU.


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
