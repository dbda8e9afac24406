"""Predictions in a terminal: verdict, why, next; the step without and with the change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table

from stepscope.records.figures import factor, interval, milliseconds, significant
from stepscope.ui.terminal.console import make_console, text_line
from stepscope.ui.terminal.tables import fitting_table
from stepscope.ui.whatif import decides, judge, memory_words, verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

    from stepscope.records.prediction import Prediction
    from stepscope.ui.terminal.tables import Row
    from stepscope.ui.whatif import Tried

_STYLES = {"faster": "bold green", "slower": "bold red", "no difference": "bold yellow"}


def print_prediction(
    before: Prediction,
    after: Prediction,
    *,
    headline: str,
    why: str,
    next_: str,
    on_host: bool = False,
    width: int | None = None,
) -> None:
    """One or several changes together."""
    console = make_console(width)
    console.print(text_line(headline, style="bright_black"))
    console.print()
    console.print(_sentences(verdict(after), why, next_, _STYLES[judge(after)]))
    console.print()
    console.print(_steps_table(before, [after], console.width, on_host=on_host))
    for section in _lists(after.assumptions, after.refused):
        console.print()
        console.print(section)


def print_tried(
    tried: Tried,
    *,
    headline: str,
    why: str,
    next_: str,
    on_host: bool = False,
    width: int | None = None,
) -> None:
    """Several changes, one at a time, the best first."""
    console = make_console(width)
    best = tried.predictions[0]
    console.print(text_line(headline, style="bright_black"))
    console.print()
    worth = judge(best) == "faster"
    sentence = verdict(best) if worth else "nothing that was tried would make this step faster"
    style = _STYLES["faster" if worth else "no difference"]
    console.print(_sentences(sentence, why, next_, style))
    console.print()
    console.print(_steps_table(tried.before, tried.predictions, console.width, on_host=on_host))
    for section in _lists((), tried.refused):
        console.print()
        console.print(section)


def _sentences(verdict_: str, why_: str, next_: str, style: str) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bright_black", no_wrap=True)
    grid.add_column()
    grid.add_row("verdict", text_line(verdict_, style=style))
    grid.add_row("why", why_)
    grid.add_row("next", next_)
    return grid


def _steps_table(
    before: Prediction, changed: Sequence[Prediction], width: int, *, on_host: bool
) -> Table:
    """The step without any change first: a prediction has to be better than that."""
    columns = [("", "l"), ("step", "r"), ("95%", "r"), ("samples/s", "r")]
    if not on_host:
        columns += [("host", "r"), ("device", "r"), ("bottleneck", "l")]
    with_memory = any(step.peak_bytes is not None for step in (before, *changed))
    if with_memory:
        columns.append(("peak memory", "r"))
    rows: list[Row] = []
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
            cells.append(decides(prediction.predicted_ms, host, device))
        if with_memory:
            cells.append(memory_words(prediction))
        rows.append((cells, "bright_black" if prediction is before else None))
    return fitting_table(
        "one change at a time" if len(changed) > 1 else "the step",
        columns,
        rows,
        width=width,
        spare=("host", "device", "bottleneck", "peak memory"),
    )


def _name(prediction: Prediction) -> str:
    if len(prediction.settings) > 1:
        return "all of it"
    return str(prediction.settings[0]) if prediction.settings else "no change"


def _lists(assumptions: Iterable[str], refused: Iterable[str]) -> list[RenderableType]:
    sections: list[RenderableType] = []
    for title, lines in (("assumed", assumptions), ("does not apply here", refused)):
        distinct = dict.fromkeys(lines)
        if distinct:
            grid = Table.grid(padding=(0, 1))
            grid.add_column(style="bright_black", no_wrap=True)
            grid.add_column()
            for line in distinct:
                grid.add_row("-", line)
            sections.append(Group(text_line(title, style="bold"), grid))
    return sections
