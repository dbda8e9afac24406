"""How every table in the terminal looks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.table import Table

from stepscope.ui.terminal.console import text_line

if TYPE_CHECKING:
    from stepscope.ui.answer import Answer

_GAP = 2
_WRAPPED = ("what", "verdict", "transports")  # sentences: they may take several lines

SEVERITY_STYLES = {"high": "bold red", "medium": "yellow", "low": "cyan", "none": "green"}
Row = tuple[Sequence[str], str | None]  # cells and a style


def answer_grid(answer: Answer, style: str = "bold") -> Table:
    """The first lines of every answer; the caller may add rows."""
    grid = labelled_grid()
    grid.add_row("verdict", text_line(answer.verdict, style=style))
    grid.add_row("why", answer.why)
    grid.add_row("next", answer.next)
    return grid


def labelled_grid() -> Table:
    """Two columns: a faint label, and what it says."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bright_black", no_wrap=True)
    grid.add_column()
    return grid


def fitting_table(
    title: str,
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Row],
    *,
    width: int,
    spare: Sequence[str],
) -> Table:
    """Drop `spare` columns, in their order, until the table fits: no number is ever cut."""
    needs = {
        name: _GAP + max(map(cell_len, (name, *(cells[place] for cells, _ in rows))))
        for place, (name, _) in enumerate(columns)
    }
    for name in spare:
        if sum(needs.values()) > width:
            needs.pop(name, None)
    shown = [place for place, (name, _) in enumerate(columns) if name in needs]
    table = titled_table(title, *(columns[place] for place in shown))
    for cells, style in rows:
        table.add_row(*(cells[place] for place in shown), style=style)
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
