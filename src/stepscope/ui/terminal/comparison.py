"""Print a comparison and the track record of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.text.figures import (
    change_marks,
    milliseconds,
    percent,
    relative_change,
    relative_interval,
    signed,
    signed_percent,
    significant,
    size,
)
from stepscope.ui.terminal.console import (
    FAINT,
    answer_grid,
    fitting_table,
    make_console,
    note_line,
    print_path,
    text_line,
    titled_table,
)
from stepscope.ui.topics.comparison import (
    PROMISE_COLUMNS,
    SUMMARY_COLUMNS,
    comparison_answer,
    ignored_words,
    median_words,
    merged_notes,
    newest_first,
    open_words,
    phases_and_rest,
    profiled_words,
    promise_cells,
    promise_words,
    record_answer,
    row_name,
    run_with_words,
    summary_cells,
    unread_words,
    whole_steps,
)
from stepscope.ui.words import PARTS, short_kernel

if TYPE_CHECKING:
    from stepscope.records.comparison import Comparison, NameChange
    from stepscope.records.prediction import Delivery, TrackedPromise
    from stepscope.verify.track_record import Summary

# A comparison in a terminal: verdict, why, next; the interval as a picture; what changed.

_STYLES = {"faster": "bold green", "slower": "bold red", "no difference seen": "bold"}
_MARGIN = 0.15  # share of the picture left empty on either side
_WIDEST = 72
_WORTH_A_ROW = 0.001  # of the step


def print_comparison(
    comparison: Comparison, *, top: int = 6, width: int | None = None, report: Path | None = None
) -> None:
    """Everything, to stdout."""
    console = make_console(width)
    for section in _sections(comparison, top, console.width):
        console.print(section)
    print_path(console, "report  ", report)


def draw_interval(low: float, value: float, high: float, width: int) -> tuple[str, str]:
    """A line with the interval, the change and zero, and a line of labels under it."""
    ends = (min(low, 0.0), max(high, 0.0))
    margin = _MARGIN * ((ends[1] - ends[0]) or 1.0)
    left, right = ends[0] - margin, ends[1] + margin

    def place(share: float) -> int:
        return round((share - left) / (right - left) * (width - 1))

    line = ["·"] * width
    for cell in range(place(low), place(high) + 1):
        line[cell] = "─"
    line[place(0.0)] = "│"
    line[place(low)], line[place(high)], line[place(value)] = "├", "┤", "●"
    labels = [" "] * width
    marked = (value, low, high, 0.0)
    for share, mark in zip(marked, change_marks(marked), strict=True):
        _label(labels, place(share), mark)
    return "".join(line), "".join(labels).rstrip()


def _label(cells: list[str], place: int, text: str) -> None:
    """Centred under its mark, or left out if another label is in the way."""
    start = min(max(0, place - len(text) // 2), len(cells) - len(text))
    around = cells[max(0, start - 1) : start + len(text) + 1]
    if all(cell == " " for cell in around):
        cells[start : start + len(text)] = text


def _sections(comparison: Comparison, top: int, width: int) -> list[RenderableType]:
    out: list[RenderableType] = [_first_lines(comparison), Text()]
    picture = draw_interval(comparison.low, comparison.change, comparison.high, min(width, _WIDEST))
    out += [*map(Text, picture), Text()]
    if comparison.phases:
        out += [_phases(comparison, width), Text()]
    parts = _budget(comparison)
    if parts.row_count:
        out += [_budget_title(comparison), parts, Text()]
    operators = _names("operators", comparison.operators, comparison.a_ms, top, width)
    if not operators.row_count:  # kernels would repeat what operators show
        operators = _names("kernels", comparison.kernels, comparison.a_ms, top, width)
    for table in (_runs(comparison, width), operators, _config(comparison, width)):
        if table is not None and table.row_count:
            out += [table, Text()]
    return [*out, *map(note_line, merged_notes(comparison.notes))]


def _first_lines(comparison: Comparison) -> Table:
    grid = answer_grid(comparison_answer(comparison), _STYLES[comparison.verdict])
    if run_with := run_with_words(comparison):
        grid.add_row("with", text_line(run_with))
    if median := median_words(comparison):
        grid.add_row("typical", median)
    if profiled := profiled_words(comparison):
        grid.add_row("profiled", text_line(profiled, style=FAINT))
    if comparison.slow_steps is not None:
        slow = comparison.slow_steps
        grid.add_row(
            "slow steps",
            f"95th percentile {significant(slow.a_ms)} -> {milliseconds(slow.b_ms)}, "
            f"{relative_change(slow.change)} ({relative_interval(slow.low, slow.high)})",
        )
    if comparison.a_peak_bytes is not None and comparison.b_peak_bytes is not None:
        change = comparison.b_peak_bytes / comparison.a_peak_bytes - 1
        grid.add_row(
            "memory",
            f"peak {size(comparison.a_peak_bytes)} -> {size(comparison.b_peak_bytes)}, "
            f"{relative_change(change)}",
        )
    if comparison.promise is not None:
        style = "green" if comparison.promise.inside else "yellow"
        grid.add_row("prediction", text_line(promise_words(comparison.promise), style=style))
    for promise in comparison.open_promises:
        grid.add_row("prediction", text_line(open_words(promise), style="yellow"))
    return grid


def _runs(comparison: Comparison, width: int) -> Table | None:
    """Nothing if one run a side says no more than the verdict."""
    runs = [*comparison.a.runs, *comparison.b.runs]
    if len(runs) == 2 and not any(run.warm_up or run.drift for run in runs):
        return None
    columns = ("", ">mean", ">median", ">steps", ">effective", ">warm-up", ">drift", "path")
    table = titled_table("runs", *columns)
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        for run in side.runs:
            rank = f" rank {run.rank}" if run.rank is not None else ""
            table.add_row(
                name,
                milliseconds(run.mean_ms),
                milliseconds(run.median_ms),
                str(run.steps),
                f"{run.effective_steps:.0f}",
                str(run.warm_up) if run.warm_up else "",
                signed_percent(run.drift) if run.drift else "",
                short_kernel(f"{run.path}{rank}", max(16, width - 55)),
            )
    return table


def _budget_title(comparison: Comparison) -> Text:
    """A line of its own, because a table's title wraps at the table's width."""
    a, b = map(significant, whole_steps(comparison))
    profiled = "profiled " if comparison.is_as_recorded else ""
    return Text.assemble(
        (f"parts of the {profiled}step", "bold"),
        (f"  {a} -> {b} ms, split like a few profiled steps", "bright_black"),
    )


def _budget(comparison: Comparison) -> Table:
    table = titled_table("", "part", ">A", ">B", ">change")
    for row in sorted(comparison.budget, key=lambda row: -abs(row.change_ms)):
        if abs(row.change_ms) >= _WORTH_A_ROW * comparison.a_ms:
            table.add_row(
                PARTS[row.id][0].lower(),
                milliseconds(row.a_ms),
                milliseconds(row.b_ms),
                f"{signed(row.change_ms)} ms",
            )
    return table


def _phases(comparison: Comparison, width: int) -> Table:
    bounds = f">{percent(comparison.confidence)} interval"
    columns = ["phase", ">A", ">B", ">change", bounds, ""]
    rows = []
    for row in phases_and_rest(comparison):
        changed = not row.low_ms <= 0 <= row.high_ms
        numbers = [significant(row.a_ms), significant(row.b_ms), signed(row.change_ms)]
        ends = f"{signed(row.low_ms)} to {signed(row.high_ms)}"
        rows.append([row_name(row.id), *numbers, ends, "changed" if changed else ""])
    stalls = ", stalls per mean step" if comparison.stalls else ""
    title = f"phases of the loop, median of all steps{stalls}, ms"
    return fitting_table(title, columns, rows, width=width, spare=("B", "A"))


def _names(title: str, rows: tuple[NameChange, ...], step_ms: float, top: int, width: int) -> Table:
    table = titled_table(f"{title}, ms a step", ">change", ">A", ">B", ">calls", "name")
    for row in [row for row in rows if abs(row.change_ms) >= _WORTH_A_ROW * step_ms][:top]:
        table.add_row(
            signed(row.change_ms),
            "new" if row.a_ms is None else significant(row.a_ms),
            "gone" if row.b_ms is None else significant(row.b_ms),
            _calls(row),
            short_kernel(row.name, max(16, width - 44)),
        )
    return table


def _calls(row: NameChange) -> str:
    a, b = (f"{calls:.4g}" if calls else "0" for calls in (row.a_calls, row.b_calls))
    return a if a == b else f"{a} -> {b}"


def _config(comparison: Comparison, width: int) -> Table:
    table = titled_table("what else differs", "", "A", "B")
    room = max(16, (width - 24) // 2)
    for row in comparison.config:
        a, b = row.a or "-", row.b or "-"
        if max(len(a), len(b)) > room:
            a, b = _without_common(a, b)
        table.add_row(row.name.replace("_", " "), _middle(a, room), _middle(b, room))
    return table


def _without_common(a: str, b: str) -> tuple[str, str]:
    """Leave out the words that both begin and end with."""
    ours, theirs = a.split(), b.split()
    shorter = min(len(ours), len(theirs))
    front = 0
    while front < shorter and ours[front] == theirs[front]:
        front += 1
    back = 0
    while back < shorter - front and ours[-1 - back] == theirs[-1 - back]:
        back += 1
    first, second = (
        " ".join(["…"] * bool(front) + side[front : len(side) - back] + ["…"] * bool(back))
        for side in (ours, theirs)
    )
    return first, second


def _middle(text: str, room: int) -> str:
    """Leave out the middle: most differences are at an end."""
    if len(text) <= room:
        return text
    front = room // 3
    return f"{text[:front]}…{text[len(text) - (room - front - 1) :]}"


# Print the track record: how good each kind of prediction was, and which are open.


def print_record(
    kept: Sequence[TrackedPromise],
    rows: Sequence[Summary],
    folder: Path,
    *,
    top: int,
    unread: int = 0,
    ignored: Sequence[tuple[Delivery, str]] = (),
) -> None:
    """Everything, to stdout."""
    console = make_console()
    console.print(answer_grid(record_answer(kept)))
    console.print()
    if rows:
        for table in (_summaries(rows, console.width), _promises(kept, top, console.width)):
            console.print(table)
            console.print()
    for delivery, why in ignored:
        console.print(note_line(ignored_words(delivery, why)))
    if unread:
        console.print(note_line(unread_words(unread)))
    print_path(console, "record  ", folder)


def _summaries(rows: Sequence[Summary], width: int) -> Table:
    columns = _right_aligned(SUMMARY_COLUMNS, ("change",))
    cells = [summary_cells(row) for row in rows]
    return fitting_table("track record", columns, cells, width=width, spare=("bias",))


def _promises(kept: Sequence[TrackedPromise], top: int, width: int) -> Table:
    columns = _right_aligned(PROMISE_COLUMNS, ("id", "when", "change"))
    cells = [promise_cells(row) for row in newest_first(kept)[:top]]
    spare = ("when", "before", "error")
    return fitting_table("newest predictions", columns, cells, width=width, spare=spare)


def _right_aligned(columns: Sequence[str], words: Sequence[str]) -> list[str]:
    """All but the columns of words; fitting_table knows them by the sign."""
    return [column if column in words else f">{column}" for column in columns]
