"""A bench's answer in a terminal: the verdict, one table, what failed, which rules were broken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from stepscope.records.figures import long_duration, percent, significant, size, unsigned_percent
from stepscope.ui.bench.words import bench_answer, row_names, speed_words
from stepscope.ui.terminal.bench_scaling import print_study
from stepscope.ui.terminal.console import make_console, note_line, print_path
from stepscope.ui.terminal.tables import answer_grid, fitting_table, titled_table
from stepscope.ui.words import or_dash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rich.table import Table

    from stepscope.bench.workload import TrainingWorkload
    from stepscope.records.bench_result import BenchResults, WorkloadResult

_COLUMNS = (
    *("workload", ">samples/s", ">±", ">times as fast", ">step ms", ">busy", ">MFU"),
    *(">CPU", ">memory", ">loss", ">to target", "verdict"),
)
_SPARE = ("loss", "step ms", "CPU", "±", "memory", "verdict")
_LONGEST_TITLE = 28


def print_bench(
    results: BenchResults, files: Mapping[str, Path | None], *, width: int | None = None
) -> None:
    """Everything, to stdout; `files` are those that were written, by what they are."""
    console = make_console(width)
    good = all(row.status == "measured" for row in results.workloads)
    console.print(answer_grid(bench_answer(results), "bold green" if good else "bold"))
    console.print()
    names = row_names(results.workloads)
    rows = [[name, *_cells(row)] for name, row in zip(names, results.workloads, strict=True)]
    columns = [column for column in _COLUMNS if _has(column, rows)]
    places = [_COLUMNS.index(column) for column in columns]
    shown = [[cells[place] for place in places] for cells in rows]
    console.print(fitting_table("", columns, shown, width=console.width, spare=_SPARE))
    console.print()
    for study in results.scaling:
        print_study(console, study)
        console.print()
    for line in _about(names, results.workloads):
        console.print(Text(line), soft_wrap=True)
    for rule in results.broken_rules:
        console.print(note_line(rule), soft_wrap=True)
    for label, path in files.items():
        print_path(console, f"{label:<8}", path)


def _has(column: str, rows: Sequence[Sequence[str]]) -> bool:
    """A column that no row knows is left out."""
    return any(cells[_COLUMNS.index(column)] not in ("", "-") for cells in rows)


def _cells(row: WorkloadResult) -> list[str]:
    return [
        or_dash(row.samples_per_s, significant) if row.status == "measured" else row.status,
        _half_width(row),
        speed_words(row),
        or_dash(row.step_ms, significant),
        or_dash(row.busy, percent),
        or_dash(row.mfu, percent),
        or_dash(row.cpu, percent),
        or_dash(row.peak_bytes, size),
        _losses(row),
        _to_target(row),
        _short_verdict(row.verdict or ""),
    ]


def _half_width(row: WorkloadResult) -> str:
    """2.4%: half of the 95% interval, as a share of the throughput."""
    if row.low is None or row.high is None or not row.samples_per_s:
        return "-"
    return unsigned_percent((row.high - row.low) / 2 / row.samples_per_s)


def _losses(row: WorkloadResult) -> str:
    if row.loss_first is None or row.loss_last is None:
        return "-"
    return f"{significant(row.loss_first)} to {significant(row.loss_last)}"


def _to_target(row: WorkloadResult) -> str:
    if row.time_to_target_s is not None:
        return long_duration(row.time_to_target_s * 1e9)
    return "missed" if row.target_reached is False else "-"


def _short_verdict(verdict: str) -> str:
    """The finding's title alone: the whole sentence is in the JSON and in `explain`."""
    title = verdict.partition(": ")[0]
    return title if len(title) <= _LONGEST_TITLE else f"{title[: _LONGEST_TITLE - 1]}…"


def _about(names: Sequence[str], rows: Sequence[WorkloadResult]) -> list[str]:
    """What is noted of each; what was not measured for one reason is named together."""
    notes = [f"{name}: {note}" for name, row in zip(names, rows, strict=True) for note in row.notes]
    reasons: dict[str, list[str]] = {}
    for name, row in zip(names, rows, strict=True):
        if row.status != "measured":
            reasons.setdefault(f"{row.status}: {row.why or 'for an unknown reason'}", []).append(
                name
            )
    return [*notes, *(f"{', '.join(named)}: {reason}" for reason, named in reasons.items())]


def print_list(workloads: Sequence[TrainingWorkload], *, width: int | None = None) -> None:
    """The catalogue, one line each: names, tasks, where each comes from."""
    console = make_console(width)
    table: Table = titled_table("", "workload", "task", "source")
    for workload in workloads:
        table.add_row(workload.name, workload.task, workload.source)
    for column in table.columns[:2]:  # only the source may be cut
        column.min_width = max(map(len, map(str, (column.header, *column.cells))))
    console.print(table)
