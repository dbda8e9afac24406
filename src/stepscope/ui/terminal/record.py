"""The track record in a terminal: how good each what-if's promises were, and which are open."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stepscope.records.figures import (
    interval,
    milliseconds,
    percent,
    signed_percent,
    significant,
    unsigned_percent,
)
from stepscope.ui.record import ignored_words, record_answer, unread_words
from stepscope.ui.terminal.console import make_console, note_line, print_path
from stepscope.ui.terminal.tables import answer_grid, fitting_table
from stepscope.ui.words import or_dash

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
    columns = ["what-if", ">promised", ">delivered", ">median error", ">bias", ">inside"]
    cells = [
        [
            row.name,
            str(row.promised),
            str(row.delivered),
            or_dash(row.median_error, unsigned_percent),
            or_dash(row.median_bias, signed_percent),
            or_dash(row.inside, percent),
        ]
        for row in rows
    ]
    return fitting_table("promised against delivered", columns, cells, width=width, spare=("bias",))


def _promises(kept: Sequence[TrackedPromise], top: int, width: int) -> Table:
    columns = ["id", "when", "what-if", ">before", ">promised", ">delivered", ">error"]
    newest = sorted(kept, key=lambda row: -row.promise.when_unix)[:top]
    spare = ("when", "before", "error")
    return fitting_table(
        "newest promises", columns, [_cells(row) for row in newest], width=width, spare=spare
    )


def _cells(kept: TrackedPromise) -> list[str]:
    promise, delivered, error = kept.promise, kept.delivered_ms, kept.error
    return [
        promise.id,
        time.strftime("%Y-%m-%d %H:%M", time.localtime(promise.when_unix)),
        promise.words,
        milliseconds(promise.baseline_ms),
        f"{significant(promise.predicted_ms)} ({interval(promise.low_ms, promise.high_ms)})",
        "open" if delivered is None else milliseconds(delivered),
        or_dash(error, signed_percent),
    ]
