"""The track record in a terminal: how good promises were, by what-if; which are still open."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from stepscope.ui.comparison import percent
from stepscope.ui.record import ignored_words, unread_words, words_of
from stepscope.ui.terminal.console import make_console, text_line
from stepscope.ui.terminal.tables import fitting_table
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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
    words = words_of(kept)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bright_black", no_wrap=True)
    grid.add_column()
    grid.add_row("verdict", text_line(words.verdict, style="bold"))
    grid.add_row("why", words.why)
    grid.add_row("next", words.next)
    console.print(grid)
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
            _DASH if row.median_error is None else percent(row.median_error),
            _DASH if row.median_bias is None else percent(row.median_bias, sign=True),
            _DASH if row.inside is None else f"{row.inside:.0%}",
        ]
        for row in rows
    ]
    return fitting_table(
        "promised against delivered",
        columns,
        [(each, None) for each in cells],
        width=width,
        spare=("bias",),
    )


def _promises(kept: Sequence[TrackedPromise], top: int, width: int) -> Table:
    columns = [("id", "l"), ("when", "l"), ("what-if", "l"), ("before", "r"), ("promised", "r")]
    columns += [("delivered", "r"), ("error", "r")]
    newest = sorted(kept, key=lambda each: -each.promise.when_unix)[:top]
    return fitting_table(
        "newest promises",
        columns,
        [(_cells(each), None) for each in newest],
        width=width,
        spare=("when", "before", "error"),
    )


def _cells(kept: TrackedPromise) -> list[str]:
    promise, delivered, error = kept.promise, kept.delivered_ms, kept.error
    return [
        promise.id,
        time.strftime("%Y-%m-%d %H:%M", time.localtime(promise.when_unix)),
        promise.words,
        f"{promise.baseline_ms:.2f} ms",
        f"{promise.predicted_ms:.2f} ({promise.low_ms:.2f} to {promise.high_ms:.2f})",
        "open" if delivered is None else f"{delivered:.2f} ms",
        _DASH if error is None else percent(error, sign=True),
    ]
