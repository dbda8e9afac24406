"""Print a bench's answer: the verdict, one table, scaling studies, the comparison with saved
results, and which rules were broken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepscope.bench.results import (
    BenchComparison,
    BenchResults,
    ScalingStudy,
    StudyPoint,
    WorkloadResult,
)
from stepscope.text.figures import (
    interval,
    long_duration,
    percent,
    relative_change,
    signed_percent,
    significant,
    size,
    unsigned_percent,
)
from stepscope.ui.bench.words import (
    against_answer,
    against_notes,
    bench_answer,
    efficiency_words,
    interval_words,
    moved_words,
    prediction_error,
    prediction_words,
    row_name,
    row_names,
    saturation_words,
    speed_words,
)
from stepscope.ui.terminal.console import (
    answer_grid,
    fitting_table,
    make_console,
    note_line,
    print_path,
    titled_table,
)
from stepscope.ui.words import one_line, or_dash

if TYPE_CHECKING:
    from stepscope.bench.workload import TrainingWorkload

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
    # A column that no row knows is left out.
    places = [
        place
        for place in range(len(_COLUMNS))
        if any(cells[place] not in ("", "-") for cells in rows)
    ]
    columns = [_COLUMNS[place] for place in places]
    shown = [[cells[place] for place in places] for cells in rows]
    console.print(fitting_table("", columns, shown, width=console.width, spare=_SPARE))
    console.print()
    for study in results.scaling:
        print_study(console, study)
        console.print()
    reasons: dict[str, list[str]] = {}  # what was not measured for one reason is named together
    for name, row in zip(names, results.workloads, strict=True):
        for note in row.notes:
            console.print(Text(f"{name}: {note}"), soft_wrap=True)
        if row.status != "measured":
            reason = f"{row.status}: {row.why or 'for an unknown reason'}"
            reasons.setdefault(reason, []).append(name)
    for reason, named in reasons.items():
        console.print(Text(f"{', '.join(named)}: {reason}"), soft_wrap=True)
    for rule in results.broken_rules:
        console.print(note_line(rule), soft_wrap=True)
    for label, path in files.items():
        print_path(console, f"{label:<8}", path)


def _cells(row: WorkloadResult) -> list[str]:
    half = losses = to_target = "-"
    if row.low is not None and row.high is not None and row.samples_per_s:
        half = unsigned_percent((row.high - row.low) / 2 / row.samples_per_s)
    if row.loss_first is not None and row.loss_last is not None:
        losses = f"{significant(row.loss_first)} to {significant(row.loss_last)}"
    if row.time_to_target_s is not None:
        to_target = long_duration(row.time_to_target_s * 1e9)
    elif row.target_reached is False:
        to_target = "missed"
    # The finding's title alone: the whole sentence is in the JSON and in `explain`.
    title = (row.verdict or "").partition(": ")[0]
    return [
        or_dash(row.samples_per_s, significant) if row.status == "measured" else row.status,
        half,
        speed_words(row),
        or_dash(row.step_ms, significant),
        or_dash(row.busy, percent),
        or_dash(row.mfu, percent),
        or_dash(row.cpu, percent),
        or_dash(row.peak_bytes, size),
        losses,
        to_target,
        title if len(title) <= _LONGEST_TITLE else f"{title[: _LONGEST_TITLE - 1]}…",
    ]


def print_list(workloads: Sequence[TrainingWorkload], *, width: int | None = None) -> None:
    """The catalogue, one line each: names, tasks, where each comes from."""
    console = make_console(width)
    table: Table = titled_table("", "workload", "task", "source")
    for workload in workloads:
        table.add_row(workload.name, workload.task, workload.source)
    for column in table.columns[:2]:  # only the source may be cut
        column.min_width = max(map(len, map(str, (column.header, *column.cells))))
    console.print(table)


# A bench against saved results in a terminal: the verdict, one row per workload, what to know.


def print_against(comparison: BenchComparison, *, width: int | None = None) -> None:
    """Everything, to stdout."""
    console = make_console(width)
    verdicts = {change.verdict for change in comparison.workloads}
    style = "bold red" if "slower" in verdicts else "bold"
    console.print()
    console.print(answer_grid(against_answer(comparison), style))
    console.print()
    rows = [
        [
            row_name(change),
            or_dash(change.base_ms, significant),
            or_dash(change.now_ms, significant),
            or_dash(change.counted_change, relative_change),
            interval_words(change),
            moved_words(change) or "-",
            change.verdict,
        ]
        for change in comparison.workloads
    ]
    columns = ("workload", ">base ms", ">now ms", ">change", ">interval", "moved")
    spare = ("moved", "base ms", "now ms", "interval")
    table = fitting_table(
        "", (*columns, "against the base"), rows, width=console.width, spare=spare
    )
    console.print(table)
    console.print()
    for note in against_notes(comparison):
        console.print(note_line(note), soft_wrap=True)


# A scaling study in a terminal: one row for each point, with a bar and the prediction's mark.

_BAR = 24
_MEASURED, _PREDICTED = "█", "┃"
_STUDY_SPARE = ("interval", "its interval", "efficiency", "off")


def print_study(console: Console, study: ScalingStudy) -> None:
    columns = (
        *(">batch", ">ranks", f">{study.samples}/s", ">interval", ">predicted", ">its interval"),
        *(">off", ">efficiency", f"{_MEASURED} measured {_PREDICTED} predicted"),
    )
    speeds = [(point.samples_per_s, point.predicted_samples_per_s) for point in study.points]
    top = max((value for pair in speeds for value in pair if value), default=0.0)

    def ends(low: float | None, high: float | None) -> str:
        return interval(low, high) if low is not None and high is not None else "-"

    rows = [
        (
            f"{point.batch:,}",
            str(point.ranks),
            or_dash(point.samples_per_s, significant),
            ends(point.low, point.high),
            or_dash(point.predicted_samples_per_s, significant),
            ends(point.predicted_low, point.predicted_high),
            or_dash(prediction_error(point), signed_percent),
            or_dash(point.efficiency, percent),
            draw_bar(point, top),
        )
        for point in study.points
    ]
    title = f"Scaling of {' + '.join((study.name, *study.remedies))}"
    console.print(fitting_table(title, columns, rows, width=console.width, spare=_STUDY_SPARE))
    words = (saturation_words(study), efficiency_words(study), prediction_words(study.points))
    for sentence in filter(None, words):
        console.print(Text(sentence), soft_wrap=True)
    notes = [
        f"batch {point.batch:,}, ranks {point.ranks}: {point.why}"
        for point in study.points
        if point.why
    ]
    for note in (*notes, *study.notes):
        console.print(note_line(one_line(note)), soft_wrap=True)


def draw_bar(point: StudyPoint, top: float, width: int = _BAR) -> str:
    """Measured throughput as a bar, the predicted one as a mark in it or beyond it."""
    cells = [" "] * width
    if point.samples_per_s:
        filled = max(1, round(width * point.samples_per_s / top))
        cells[:filled] = _MEASURED * filled
    if point.predicted_samples_per_s:
        at = round(width * point.predicted_samples_per_s / top) - 1
        cells[min(width - 1, max(0, at))] = _PREDICTED
    return "".join(cells).rstrip()
