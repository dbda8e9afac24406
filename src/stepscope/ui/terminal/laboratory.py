"""The collectives laboratory in a terminal: a table for each collective, then the crossovers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from stepscope.records.figures import binary_size, duration, percent, significant
from stepscope.records.words import counted
from stepscope.ui.laboratory import (
    algorithm_name,
    crossover_words,
    crossovers_right,
    kinds_of,
    laboratory_answer,
    link_rows,
    of_kind,
)
from stepscope.ui.terminal.console import make_console, print_path, text_line
from stepscope.ui.terminal.tables import answer_grid, fitting_table, titled_table

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from stepscope.records.laboratory import AlgorithmTimes, LaboratoryReport

_MOST_SIZES = 4


def print_laboratory(
    report: LaboratoryReport, *, page: Path | None = None, width: int | None = None
) -> None:
    """Everything, to stdout."""
    console = make_console(width)
    facts = [report.host, report.device, f"torch {report.torch}"]
    facts.append(f"{counted(report.world_size, 'rank')}, {report.backend}")
    console.print(text_line(" · ".join(facts), style="bright_black"), Text(), sep="\n")
    console.print(answer_grid(laboratory_answer(report)), Text(), _link(report), sep="\n")
    for kind in kinds_of(report):
        console.print(Text(), _algorithms(kind, of_kind(report, kind), console.width), sep="\n")
    if report.crossovers:
        console.print(Text(), _crossovers(report, console.width), sep="\n")
    if page is not None:
        console.print()
        print_path(console, "report   ", page)


def _link(report: LaboratoryReport) -> Table:
    table = titled_table("one step, from probes", "part", ">measured")
    for label, value in link_rows(report):
        table.add_row(label, value)
    return table


def _algorithms(kind: str, algorithms: list[AlgorithmTimes], width: int) -> Table:
    """Measured times at a few sizes; the formula's error over all of them."""
    count = len(algorithms[0].sizes)
    shown = sorted({round(i * (count - 1) / (_MOST_SIZES - 1)) for i in range(_MOST_SIZES)})
    sizes = [binary_size(algorithms[0].sizes[place].size_bytes) for place in shown]
    columns = ["algorithm", ">steps", ">sent", *(f">{size}" for size in sizes), ">formula off"]
    rows = []
    for times in sorted(algorithms, key=lambda one: one.sizes[-1].time_ns):
        cells = [duration(times.sizes[place].time_ns) for place in shown]
        steps = "-" if times.steps is None else str(times.steps)
        sent = "-" if times.sent is None else f"{significant(times.sent)} n"
        off = "-" if times.error is None else percent(times.error)
        rows.append([algorithm_name(times.algorithm), steps, sent, *cells, off])
    spare = [*sizes[1:-1], "sent", "steps"]
    return fitting_table(kind, columns, rows, width=width, spare=spare)


def _crossovers(report: LaboratoryReport, width: int) -> Table:
    right, count = crossovers_right(report.crossovers), len(report.crossovers)
    title = f"crossovers: {right} of {count} predicted within a factor of two"
    columns = ["collective", "from → to", ">predicted", ">measured"]
    rows = [[one.kind, *crossover_words(one)] for one in report.crossovers]
    return fitting_table(title, columns, rows, width=width, spare=["collective"])
