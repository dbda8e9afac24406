"""A tune's answer in a terminal: the verdict, one table, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
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
    """The command to go on with is the last line."""
    console = make_console(width)
    console.print(answer_grid(tune_answer(result, folder), "bold green" if result.kept else "bold"))
    console.print()
    if result.trials:
        baseline = TriedConfiguration(
            measured_ms=result.baseline_ms,
            low_ms=result.baseline_low_ms,
            high_ms=result.baseline_high_ms,
            peak_bytes=result.baseline_peak_bytes,
        )
        _, _, measured, ends, memory, *_ = _cells(baseline, result.kept)
        first = [configuration_words(()), "", measured, ends.strip("-"), memory, "", ""]
        rows = [first, *(_cells(row, result.kept) for row in result.trials)]
        columns = ["changes", ">predicted", ">measured", ">95%", ">memory", "numbers", "kept"]
        title = "what was tried, ms per step"
        console.print(fitting_table(title, columns, rows, width=console.width, spare=_SPARE))
        console.print()
    _print_reasons(console, result)
    if result.patch:
        _print_block(console, "the change", result.patch.splitlines())
    by_hand = [
        *result.by_hand,
        *(f"set {name}={value}" for name, value in result.variables.items()),
    ]
    if by_hand:
        _print_block(console, "by hand", [f"  {line}" for line in by_hand])
    print_path(console, "folder  ", folder)
    print_path(console, "report  ", report)
    if result.kept:
        console.print(Text(run_command(result), style="bold"), soft_wrap=True)


def _print_block(console: Console, title: str, lines: Sequence[str]) -> None:
    console.print(Text(title, style="bold"))
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    console.print()


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
    # Many remedies need a GPU or several ranks: one line each would hide the others.
    reasons: dict[str, list[str]] = {}
    for left in result.left_out:
        reasons.setdefault(left.why, []).append(left.remedy)
    if reasons:
        lines = [f"  {', '.join(remedies)}: {why}" for why, remedies in reasons.items()]
        _print_block(console, "not tried", lines)
