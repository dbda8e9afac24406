"""A table of an answer: what a topic says of its rows, written once for every surface.

The terminal prints it (`ui/terminal/console.py`), pages show it (`page/sections.html.j2`). A page
has more room: there a column may have a longer heading and other words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

Row = TypeVar("Row")


class Column(NamedTuple, Generic[Row]):
    """A heading and the words below it; a surface on which the heading is None has no column.

    Headings that begin with ">" stand over numbers.
    """

    name: str | None  # in a terminal
    words: Callable[[Row], str]
    title: str | None = None  # on a page
    page_words: Callable[[Row], str] | None = None  # where they differ


class Cells(NamedTuple):
    """A table as a surface takes it."""

    title: str
    columns: list[str]
    rows: list[list[str]]


class Table(msgspec.Struct, Generic[Row], frozen=True, kw_only=True):
    columns: Sequence[Column[Row]]
    rows: Iterable[Row] = ()
    title: str = ""

    def for_terminal(self, *left_out: str) -> Cells:
        shown = [
            column
            for column in self.columns
            if column.name is not None and column.name.lstrip(">") not in left_out
        ]
        rows = [[column.words(row) for column in shown] for row in self.rows]
        return Cells(self.title, [column.name or "" for column in shown], rows)

    def for_page(self) -> Cells:
        shown = [column for column in self.columns if column.title is not None]
        rows = [[(column.page_words or column.words)(row) for column in shown] for row in self.rows]
        return Cells(self.title, [column.title or "" for column in shown], rows)
