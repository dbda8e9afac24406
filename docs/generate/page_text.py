"""Write markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; bars in its cells are escaped."""
    lines = [_line(head), "|" + "---|" * len(head)]
    lines += [_line([_cell(cell) for cell in row]) for row in rows]
    return "\n".join(lines)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def _line(cells: Sequence[str]) -> str:
    return f"|{'|'.join(cells)}|"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
