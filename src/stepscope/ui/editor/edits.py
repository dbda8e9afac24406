"""Follow measured lines and changes through edits of a text: as they were, moved, changed or
gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from stepscope.records.source_lines import FollowedLine, FollowedLines, LineCost, LineCosts


def follow(costs: LineCosts, file: Path, text: str) -> FollowedLines:
    """Return the lines measured in `file`, in its present text."""
    name = str(file.resolve())
    measured = [cost for cost in costs.lines if cost.file == name]
    before = costs.texts.get(name)
    if before is None:  # nothing shows that a line is still the one that was measured
        kept = [FollowedLine(cost=cost, state="stale", line=cost.line) for cost in measured]
        return FollowedLines(file=name, lines=tuple(kept))
    old, new = source_lines(before), source_lines(text)
    places = _places(old, new)
    return FollowedLines(file=name, lines=tuple(_followed(cost, places) for cost in measured))


def source_lines(text: str) -> list[str]:
    """Split lines as Python counts them; str.splitlines also ends them at form feeds."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _followed(cost: LineCost, places: Sequence[tuple[int | None, bool]]) -> FollowedLine:
    now, same = places[cost.line - 1] if cost.line <= len(places) else (None, False)
    if now is None:
        return FollowedLine(cost=cost, state="gone", line=None)
    if not same:
        return FollowedLine(cost=cost, state="stale", line=now)
    return FollowedLine(cost=cost, state="current" if now == cost.line else "moved", line=now)


def _places(old: Sequence[str], new: Sequence[str]) -> list[tuple[int | None, bool]]:
    """Return for each old line its number now (None: removed), and whether its text is the same."""
    start, end = _equal_ends(old, new)
    middle = _matched(old[start : len(old) - end], new[start : len(new) - end])
    places: list[tuple[int | None, bool]] = [(number + 1, True) for number in range(start)]
    places += [(None if now is None else now + start + 1, same) for now, same in middle]
    return places + [(len(new) - end + number + 1, True) for number in range(end)]


def _equal_ends(old: Sequence[str], new: Sequence[str]) -> tuple[int, int]:
    """Lines equal at the beginning and at the end: an edit touches few of a long file."""
    least = min(len(old), len(new))
    start = 0
    while start < least and old[start] == new[start]:
        start += 1
    end = 0
    while end < least - start and old[-1 - end] == new[-1 - end]:
        end += 1
    return start, end


def _matched(old: Sequence[str], new: Sequence[str]) -> list[tuple[int | None, bool]]:
    """A line that is only indented anew is in another block: it is found, and stale."""
    bare_old, bare_new = [line.strip() for line in old], [line.strip() for line in new]
    places: list[tuple[int | None, bool]] = [(None, False)] * len(old)
    matcher = SequenceMatcher(None, bare_old, bare_new, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            places[i1:i2] = [
                (there, old[here].rstrip() == new[there].rstrip())
                for here, there in zip(range(i1, i2), range(j1, j2), strict=True)
            ]
        elif tag == "replace":  # lines rewritten in place, as many as there are on both sides
            both = min(i2 - i1, j2 - j1)
            places[i1 : i1 + both] = [(j1 + offset, False) for offset in range(both)]
    return places


# A change of one text, made to a text that was edited since: line by line, or not at all.


@dataclass(frozen=True, slots=True)
class LineChange:
    """Lines from `start` up to `end` (from 0, `end` not included) become `lines`."""

    start: int
    end: int
    lines: tuple[str, ...]


def text_lines(text: str) -> list[str]:
    """Split lines with their ends; the text's last line only if it is not empty."""
    *whole, last = source_lines(text)
    lines = [f"{line}\n" for line in whole]
    return [*lines, last] if last else lines


def line_changes(before: str, after: str) -> list[LineChange]:
    """Return what turns one text into the other."""
    old, new = text_lines(before), text_lines(after)
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    return [
        LineChange(start, end, tuple(new[first:last]))
        for kind, start, end, first, last in matcher.get_opcodes()
        if kind != "equal"
    ]


def rebase(before: str, after: str, now: str) -> list[LineChange] | None:
    """Return the change from `before` to `after` as a change of `now`.

    None unless every changed line, and the lines next to it, stand in `now` as they did in
    `before`: then the change would not mean what it meant, or was made already.
    """
    changes = line_changes(before, after)
    if not changes:
        return None
    old, new = text_lines(before), text_lines(now)
    places = {-1: -1, len(old): len(new)}  # of old lines in `now`, its begin and end included
    for block in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        for offset in range(block.size):
            places[block.a + offset] = block.b + offset
    moved = []
    for change in changes:
        above = places.get(change.start - 1)
        around = range(change.start - 1, change.end + 1)
        if above is None or any(
            places.get(line) != above + line - change.start + 1 for line in around
        ):
            return None
        start = above + 1
        moved.append(LineChange(start, start + change.end - change.start, change.lines))
    return moved
