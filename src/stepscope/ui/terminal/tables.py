"""The one look of every table in the terminal."""

from __future__ import annotations

from rich.table import Table

_WRAPPED = ("what", "verdict", "transports")  # sentences: they may take several lines


def titled_table(title: str, *columns: tuple[str, str]) -> Table:
    """Columns are (name, "r" or "l")."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="bright_black",
    )
    for name, side in columns:
        wrapped = name in _WRAPPED
        table.add_column(
            name,
            justify="right" if side == "r" else "left",
            no_wrap=not wrapped,
            overflow="fold" if wrapped else "ellipsis",
        )
    return table
