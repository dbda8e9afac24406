"""The track record in a terminal: how good promises were, by what-if; which are still open."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from stepscope.ui.comparison import percent
from stepscope.ui.record import words_of
from stepscope.ui.terminal.explanation import make_console
from stepscope.ui.terminal.tables import titled_table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.records.promise import Kept
    from stepscope.verify.track_record import Summary

_DASH = "-"


def print_record(
    kept: Sequence[Kept],
    rows: Sequence[Summary],
    folder: Path,
    *,
    top: int,
    width: int | None = None,
) -> None:
    """Everything, to stdout."""
    console = make_console(width)
    words = words_of(kept)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bright_black", no_wrap=True)
    grid.add_column()
    grid.add_row("verdict", Text(words.verdict, style="bold"))
    grid.add_row("why", words.why)
    grid.add_row("next", words.next)
    console.print(grid)
    console.print()
    if rows:
        console.print(_summaries(rows))
        console.print()
        console.print(_promises(kept, top))
        console.print()
    console.print(Text.assemble("record  ", (str(folder), "bold")), soft_wrap=True)


def _summaries(rows: Sequence[Summary]) -> Table:
    table = titled_table(
        "promised against delivered",
        ("what-if", "l"),
        ("promised", "r"),
        ("delivered", "r"),
        ("median error", "r"),
        ("bias", "r"),
        ("inside", "r"),
    )
    for row in rows:
        table.add_row(
            row.name,
            str(row.promised),
            str(row.delivered),
            _DASH if row.median_error is None else percent(row.median_error),
            _DASH if row.median_bias is None else percent(row.median_bias, sign=True),
            _DASH if row.inside is None else f"{row.inside:.0%}",
        )
    return table


def _promises(kept: Sequence[Kept], top: int) -> Table:
    table = titled_table(
        "newest promises",
        ("id", "l"),
        ("when", "l"),
        ("what-if", "l"),
        ("before", "r"),
        ("promised", "r"),
        ("delivered", "r"),
        ("error", "r"),
    )
    for each in sorted(kept, key=lambda each: -each.promise.when_unix)[:top]:
        promise, delivered, error = each.promise, each.delivered_ms, each.error
        table.add_row(
            promise.id,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(promise.when_unix)),
            promise.words,
            f"{promise.baseline_ms:.2f} ms",
            f"{promise.predicted_ms:.2f} ({promise.low_ms:.2f} to {promise.high_ms:.2f})",
            "open" if delivered is None else f"{delivered:.2f} ms",
            _DASH if error is None else percent(error, sign=True),
        )
    return table
