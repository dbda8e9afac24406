"""A change of one text, made to a text that was edited since: line by line, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher

from stepscope.ui.editor.follow import source_lines


@dataclass(frozen=True, slots=True)
class LineChange:
    """Lines from `start` up to `end` (from 0, `end` not included) become `lines`."""

    start: int
    end: int
    lines: tuple[str, ...]


def text_lines(text: str) -> list[str]:
    """With their ends; the text's last line only if it is not empty."""
    *whole, last = source_lines(text)
    lines = [f"{line}\n" for line in whole]
    return [*lines, last] if last else lines


def line_changes(before: str, after: str) -> list[LineChange]:
    """What makes the one of the other."""
    old, new = text_lines(before), text_lines(after)
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    return [
        LineChange(start, end, tuple(new[first:last]))
        for kind, start, end, first, last in matcher.get_opcodes()
        if kind != "equal"
    ]


def rebase(before: str, after: str, now: str) -> list[LineChange] | None:
    """The change from `before` to `after` as a change of `now`.

    None unless every changed line, and the lines next to it, stand in `now` as they did in
    `before`: then the change would not mean what it meant, or was made already.
    """
    changes = line_changes(before, after)
    if not changes:
        return None
    places = _Places(text_lines(before), text_lines(now))
    moved = []
    for change in changes:
        start = places.start_of(change)
        if start is None:
            return None
        moved.append(LineChange(start, start + change.end - change.start, change.lines))
    return moved


class _Places:
    """Where lines of one text are in another, the text's begin and end included."""

    def __init__(self, old: list[str], new: list[str]) -> None:
        self._of = {-1: -1, len(old): len(new)}
        for block in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
            for offset in range(block.size):
                self._of[block.a + offset] = block.b + offset

    def start_of(self, change: LineChange) -> int | None:
        before = self._of.get(change.start - 1)
        if before is None:
            return None
        around = range(change.start - 1, change.end + 1)
        if any(self._of.get(line) != before + line - change.start + 1 for line in around):
            return None
        return before + 1
