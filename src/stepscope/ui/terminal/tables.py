"""The one look of every table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.table import Table

_GAP = 2
_WRAPPED = ("what", "verdict", "transports")  # sentences: they may take several lines


Row = tuple[Sequence[str], str | None]  # cells and a style


def fitting_table(
    title: str,
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Row],
    *,
    width: int,
    spare: Sequence[str],
) -> Table:
    """Whole numbers in a narrow terminal: spare columns go, the first named first."""
    needs = {
        name: _GAP + max(map(cell_len, (name, *(cells[place] for cells, _ in rows))))
        for place, (name, _) in enumerate(columns)
    }
    for name in spare:
        if sum(needs.values()) > width:
            needs.pop(name, None)
    kept = [place for place, (name, _) in enumerate(columns) if name in needs]
    table = titled_table(title, *(columns[place] for place in kept))
    for cells, style in rows:
        table.add_row(*(cells[place] for place in kept), style=style)
    return table


def titled_table(title: str, *columns: tuple[str, str]) -> Table:
    """Columns are (name, "r" or "l")."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, _GAP, 0, 0),
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
