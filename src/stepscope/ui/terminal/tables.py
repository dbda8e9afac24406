"""How every table in the terminal looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.table import Table

from stepscope.ui.terminal.console import text_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.ui.answer import Answer

_GAP = 2
_WRAPPED = ("what", "verdict", "transports")  # sentences: they may take several lines

SEVERITY_STYLES = {"high": "bold red", "medium": "yellow", "low": "cyan", "none": "green"}


def answer_grid(answer: Answer, style: str = "bold") -> Table:
    """The first lines of every answer; the caller may add rows."""
    grid = labelled_grid()
    grid.add_row("verdict", text_line(answer.verdict, style=style))
    grid.add_row("why", answer.why)
    grid.add_row("next", answer.next)
    return grid


def labelled_grid(gap: int = _GAP) -> Table:
    """Two columns: a faint label, and what it says."""
    grid = Table.grid(padding=(0, gap))
    grid.add_column(style="bright_black", no_wrap=True)
    grid.add_column()
    return grid


def fitting_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int,
    spare: Sequence[str],
) -> Table:
    """Drop `spare` columns, in their order, until the table fits: no number is ever cut."""
    names = [column.lstrip(">") for column in columns]
    needs = {
        name: _GAP + max(map(cell_len, (name, *(cells[place] for cells in rows))))
        for place, name in enumerate(names)
    }
    for name in spare:
        if sum(needs.values()) > width:
            needs.pop(name, None)
    shown = [place for place, name in enumerate(names) if name in needs]
    table = titled_table(title, *(columns[place] for place in shown))
    for cells in rows:
        table.add_row(*(cells[place] for place in shown))
    return table


def titled_table(title: str, *columns: str) -> Table:
    """A column whose name begins with ">" is aligned to the right, as numbers are."""
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, _GAP, 0, 0),
        header_style="bright_black",
    )
    for column in columns:
        wrapped = column in _WRAPPED
        table.add_column(
            column.lstrip(">"),
            justify="right" if column.startswith(">") else "left",
            no_wrap=not wrapped,
            overflow="fold" if wrapped else "ellipsis",
        )
    return table
