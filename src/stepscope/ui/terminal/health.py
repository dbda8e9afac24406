"""A job's health in a terminal: a word and a sentence on each line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from stepscope.ui.terminal.console import make_console

if TYPE_CHECKING:
    from stepscope.ui.health import Health


def print_health(health: Health, *, width: int | None = None) -> None:
    """Sentences that are not known have no line."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="bright_black", no_wrap=True)
    grid.add_column(overflow="fold")
    for word, sentence in health.lines:
        if sentence:
            grid.add_row(word, sentence)
    make_console(width).print(grid)
