"""A tune's answer in a terminal: the verdict, one table, and what to change."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepscope.records.comparison import TriedConfiguration, TuneResult, short_name, short_why
from stepscope.text.figures import interval, significant, size
from stepscope.ui.terminal.console import (
    answer_grid,
    fitting_table,
    make_console,
    note_line,
    print_path,
)
from stepscope.ui.tried_remedies import run_command, tune_answer
from stepscope.ui.tune.result import configuration_words
from stepscope.ui.words import or_dash

_SPARE = ("memory", "predicted", "numbers")


def print_tune(
    result: TuneResult, folder: Path, report: Path | None = None, *, width: int | None = None
) -> None:
    """Everything, to stdout; the command to go on with is the last line."""
    console = make_console(width)
    console.print(answer_grid(tune_answer(result, folder), "bold green" if result.kept else "bold"))
    console.print()
    if result.trials:
        console.print(_table(result, console.width))
        console.print()
    _print_reasons(console, result)
    _print_change(console, result)
    print_path(console, "folder  ", folder)
    print_path(console, "report  ", report)
    if result.kept:
        console.print(Text(run_command(result), style="bold"), soft_wrap=True)


def _table(result: TuneResult, width: int) -> Table:
    columns = ["changes", ">predicted", ">measured", ">95%", ">memory", "numbers", "kept"]
    rows = [_baseline(result), *(_cells(row, result.kept) for row in result.trials)]
    return fitting_table("what was tried, ms per step", columns, rows, width=width, spare=_SPARE)


def _baseline(result: TuneResult) -> list[str]:
    ends = ""
    if result.baseline_low_ms is not None and result.baseline_high_ms is not None:
        ends = interval(result.baseline_low_ms, result.baseline_high_ms)
    return [
        configuration_words(()),
        "",
        or_dash(result.baseline_ms, significant),
        ends,
        or_dash(result.baseline_peak_bytes, size),
        "",
        "",
    ]


def _cells(row: TriedConfiguration, kept: tuple[str, ...]) -> list[str]:
    known = row.low_ms is not None and row.high_ms is not None
    return [
        short_name(row.remedies, kept),
        or_dash(row.predicted_ms, significant),
        or_dash(row.measured_ms, significant),
        interval(row.low_ms or 0.0, row.high_ms or 0.0) if known else "-",
        or_dash(row.peak_bytes, size),
        row.parity,
        "kept" if row.kept else "no",
    ]


def _print_reasons(console: Console, result: TuneResult) -> None:
    """Why each was kept or not, and why others were not tried."""
    for row in result.trials:
        name = short_name(row.remedies, result.kept)
        console.print(Text(f"{name}: {short_why(row, result.kept)}"), soft_wrap=True)
        if row.parity_detail and row.parity != "bit-identical":
            console.print(note_line(row.parity_detail), soft_wrap=True)
    if result.trials:
        console.print()
    if result.left_out:
        console.print(Text("not tried", style="bold"))
        for why, remedies in _by_reason(result).items():
            console.print(Text(f"  {', '.join(remedies)}: {why}"), soft_wrap=True)
        console.print()


def _by_reason(result: TuneResult) -> dict[str, list[str]]:
    """Many remedies need a GPU or several ranks: one line each would hide the others."""
    reasons: dict[str, list[str]] = {}
    for left in result.left_out:
        reasons.setdefault(left.why, []).append(left.remedy)
    return reasons


def _print_change(console: Console, result: TuneResult) -> None:
    """The patch, then what a person has to add."""
    if result.patch:
        console.print(Text("the change", style="bold"))
        for line in result.patch.splitlines():
            console.print(Text(line), soft_wrap=True)
        console.print()
    lines = [*result.by_hand, *(f"set {name}={value}" for name, value in result.variables.items())]
    if lines:
        console.print(Text("by hand", style="bold"))
        for line in lines:
            console.print(Text(f"  {line}"), soft_wrap=True)
        console.print()
