"""Print the track record: how good each kind of prediction was, and which are open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.ui.record import (
    PROMISE_COLUMNS,
    SUMMARY_COLUMNS,
    ignored_words,
    newest_first,
    promise_cells,
    record_answer,
    summary_cells,
    unread_words,
)
from stepscope.ui.terminal.console import make_console, note_line, print_path
from stepscope.ui.terminal.tables import answer_grid, fitting_table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.table import Table

    from stepscope.records.promise import Delivery, TrackedPromise
    from stepscope.verify.track_record import Summary


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
