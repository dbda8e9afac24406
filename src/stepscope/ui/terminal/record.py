"""The track record in a terminal: how good each what-if's promises were, and which are open."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.text import Text

from stepscope.records.figures import (
    interval,
    milliseconds,
    percent,
    signed_percent,
    significant,
    unsigned_percent,
)
from stepscope.ui.record import ignored_words, record_answer, unread_words
from stepscope.ui.terminal.console import make_console, text_line
from stepscope.ui.terminal.tables import answer_grid, fitting_table
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.table import Table

    from stepscope.records.promise import Delivery, TrackedPromise
    from stepscope.verify.track_record import Summary

_DASH = "-"


def print_record(
    kept: Sequence[TrackedPromise],
    rows: Sequence[Summary],
    folder: Path,
    *,
    top: int,
    unread: int = 0,
    ignored: Sequence[tuple[Delivery, str]] = (),
    width: int | None = None,
) -> None:
    """Everything, to stdout."""
    console = make_console(width)
    console.print(answer_grid(record_answer(kept)))
    console.print()
    if rows:
        console.print(_summaries(rows, console.width))
        console.print()
        console.print(_promises(kept, top, console.width))
        console.print()
    for delivery, why in ignored:
        console.print(text_line(f"note  {ignored_words(delivery, why)}", style="bright_black"))
    if unread:
        console.print(text_line(f"note  {unread_words(unread)}", style="bright_black"))
    console.print(Text.assemble("record  ", (one_line(str(folder)), "bold")), soft_wrap=True)


def _summaries(rows: Sequence[Summary], width: int) -> Table:
    columns = [("what-if", "l"), ("promised", "r"), ("delivered", "r"), ("median error", "r")]
    columns += [("bias", "r"), ("inside", "r")]
    cells = [
        [
            row.name,
            str(row.promised),
            str(row.delivered),
            _DASH if row.median_error is None else unsigned_percent(row.median_error),
            _DASH if row.median_bias is None else signed_percent(row.median_bias),
            _DASH if row.inside is None else percent(row.inside),
        ]
        for row in rows
    ]
    return fitting_table(
        "promised against delivered",
        columns,
        [(row, None) for row in cells],
        width=width,
        spare=("bias",),
    )


def _promises(kept: Sequence[TrackedPromise], top: int, width: int) -> Table:
    columns = [("id", "l"), ("when", "l"), ("what-if", "l"), ("before", "r"), ("promised", "r")]
    columns += [("delivered", "r"), ("error", "r")]
    newest = sorted(kept, key=lambda row: -row.promise.when_unix)[:top]
    return fitting_table(
        "newest promises",
        columns,
        [(_cells(row), None) for row in newest],
        width=width,
        spare=("when", "before", "error"),
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
        _DASH if error is None else signed_percent(error),
    ]
