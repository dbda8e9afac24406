"""Print a comparison (verdict, the interval as a picture, what changed) and the track record of
predictions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.records.comparison import Comparison
from stepscope.records.prediction import Delivery, TrackedPromise
from stepscope.text.figures import change_marks, milliseconds, signed, significant
from stepscope.ui.terminal.console import (
    FAINT,
    answer_grid,
    fitting_table,
    make_console,
    note_line,
    print_blocks,
    print_path,
    text_line,
    titled_table,
)
from stepscope.ui.topics.comparison import (
    PROMISE_COLUMNS,
    SUMMARY_COLUMNS,
    comparison_answer,
    comparison_facts,
    ignored_words,
    merged_notes,
    name_table,
    newest_first,
    phase_table,
    phases_and_rest,
    promise_cells,
    record_answer,
    run_table,
    summary_cells,
    unread_words,
    whole_steps,
)
from stepscope.ui.words import PARTS
from stepscope.verify.track_record import Summary

_STYLES = {"faster": "bold green", "slower": "bold red", "no difference seen": "bold"}
_MARGIN = 0.15  # share of the picture left empty on either side
_WIDEST = 72
_WORTH_A_ROW = 0.001  # of the step


def print_comparison(
    comparison: Comparison, *, top: int = 6, width: int | None = None, report: Path | None = None
) -> None:
    console = make_console(width)
    for block in _blocks(comparison, top, console.width):
        console.print(block)
    for note in merged_notes(comparison.notes):
        console.print(note_line(note))
    print_path(console, "report  ", report)


def _blocks(comparison: Comparison, top: int, width: int) -> Iterator[RenderableType]:
    grid = answer_grid(comparison_answer(comparison), _STYLES[comparison.verdict])
    for fact in comparison_facts(comparison):
        grid.add_row(fact.label, text_line(fact.words, style=fact.style))
    yield from (grid, Text())
    picture = draw_interval(comparison.low, comparison.change, comparison.high, min(width, _WIDEST))
    yield from (*map(Text, picture), Text())
    if comparison.phases:
        cells = phase_table(comparison, phases_and_rest(comparison)).for_terminal()
        yield from (fitting_table(*cells, width=width, spare=("B", "A")), Text())
    least = _WORTH_A_ROW * comparison.a_ms
    parts = [
        (PARTS[row.id][0].lower(), milliseconds(row.a_ms), milliseconds(row.b_ms), row.change_ms)
        for row in sorted(comparison.budget, key=lambda row: -abs(row.change_ms))
        if abs(row.change_ms) >= least
    ]
    if parts:
        a, b = map(significant, whole_steps(comparison))
        profiled = "profiled " if comparison.is_as_recorded else ""
        # A line of its own, because a table's title wraps at the table's width.
        yield Text.assemble(
            (f"parts of the {profiled}step", "bold"),
            (f"  {a} -> {b} ms, split like a few profiled steps", FAINT),
        )
        rows = [(*words, f"{signed(change_ms)} ms") for *words, change_ms in parts]
        yield from (titled_table("", "part", ">A", ">B", ">change", rows=rows), Text())
    runs = [*comparison.a.runs, *comparison.b.runs]
    # One run a side says no more than the verdict, unless it was cut or drifts.
    if len(runs) > 2 or any(run.warm_up or run.drift for run in runs):
        title, columns, run_rows = run_table(comparison, width).for_terminal()
        yield from (titled_table(title, *columns, rows=run_rows), Text())
    for kind in ("operators", "kernels"):
        names = [row for row in getattr(comparison, kind) if abs(row.change_ms) >= least]
        if names:  # kernels would repeat what operators show
            _, columns, name_rows = name_table(names[:top], width).for_terminal()
            yield from (titled_table(f"{kind}, ms a step", *columns, rows=name_rows), Text())
            break
    if comparison.config:
        yield from (_config(comparison, width), Text())


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
        # Centred under its mark, or left out if another label is in the way.
        start = min(max(0, place(share) - len(mark) // 2), width - len(mark))
        if not "".join(labels[max(0, start - 1) : start + len(mark) + 1]).strip():
            labels[start : start + len(mark)] = mark
    return "".join(line), "".join(labels).rstrip()


def _config(comparison: Comparison, width: int) -> Table:
    room = max(16, (width - 24) // 2)

    def cut_middle(text: str) -> str:  # most differences are at an end
        front = room // 3
        short = f"{text[:front]}…{text[len(text) - (room - front - 1) :]}"
        return text if len(text) <= room else short

    rows = []
    for row in comparison.config:
        a, b = row.a or "-", row.b or "-"
        if max(len(a), len(b)) > room:
            a, b = _without_common(a, b)
        rows.append((row.name.replace("_", " "), cut_middle(a), cut_middle(b)))
    return titled_table("what else differs", "", "A", "B", rows=rows)


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


def print_record(
    tracked: Sequence[TrackedPromise],
    rows: Sequence[Summary],
    folder: Path,
    *,
    top: int,
    unread: int = 0,
    ignored: Sequence[tuple[Delivery, str]] = (),
) -> None:
    """Print how good each kind of prediction was, and which are open."""
    console = make_console()
    blocks: list[RenderableType] = [answer_grid(record_answer(tracked))]
    if rows:
        summaries = [summary_cells(row) for row in rows]
        promises = [promise_cells(row) for row in newest_first(tracked)[:top]]
        for title, names, cells, spare in (
            ("track record", SUMMARY_COLUMNS, summaries, ("bias",)),
            ("newest predictions", PROMISE_COLUMNS, promises, ("when", "before", "error")),
        ):
            columns = [name if name in ("id", "when", "change") else f">{name}" for name in names]
            blocks.append(fitting_table(title, columns, cells, width=console.width, spare=spare))
    print_blocks(console, *blocks)
    console.print()
    for delivery, why in ignored:
        console.print(note_line(ignored_words(delivery, why)))
    if unread:
        console.print(note_line(unread_words(unread)))
    print_path(console, "record  ", folder)
