"""Lines of a screen: cut to its width, labelled, as many items on each as fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from stepscope.ui.terminal.console import text_line
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

LABELS = 10  # columns
FAINT = "bright_black"


def labelled(label: str, rows: Sequence[Text]) -> list[Text]:
    """A block with its label on the first line."""
    return [
        Text.assemble((f"{label if place == 0 else '':<{LABELS}}", FAINT), row)
        for place, row in enumerate(rows)
    ]


def wrapped(text: str, console: Console, most: int, style: str = "") -> list[Text]:
    """At most `most` lines; a text that is cut ends in an ellipsis."""
    if not text:
        return []
    room = console.width - LABELS
    lines = [Text(row.plain.rstrip(), style) for row in text_line(text).wrap(console, room)]
    if len(lines) > most:
        last = " ".join(line.plain for line in lines[most - 1 :])
        lines[most - 1 :] = [Text(_cut_between_words(last, room), style)]
    return lines


def _cut_between_words(text: str, room: int) -> str:
    """As `cut`, but no word loses a part, unless it is most of the text."""
    short = cut(text, room)
    if short == text:
        return short
    before, space, _ = cut(text, room).rstrip("…").rpartition(" ")
    ends_whole = text[len(short) - 1 : len(short)] == " "
    if ends_whole or not space or cell_len(before) < room // 2:
        return short
    return before.rstrip(" ,;:(") + "…"


def cut(text: str, room: int) -> str:
    """The beginning that fits, with a mark where something is missing."""
    text = one_line(text)
    if cell_len(text) <= room:
        return text
    return set_cell_size(text, max(1, room - 1)).rstrip() + "…"


def flow(items: Sequence[Text], width: int) -> list[Text]:
    """As many items on each line as fit."""
    rows: list[Text] = []
    for item in items:
        if rows and rows[-1].cell_len + 2 + item.cell_len <= width:
            rows[-1].append("  ").append_text(item)
        else:
            rows.append(item.copy())
    return rows
