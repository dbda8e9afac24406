"""The number that sets the batch size, in a script that may have been edited since it was measured.

Another literal may equal the measured batch by chance: so the number is looked for in the measured
text, and its line is followed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from stepscope.records.line_costs import BatchPlace, LineCost
from stepscope.ui.editor.batch_place import batch_in_source
from stepscope.ui.editor.follow import follow
from stepscope.ui.lsp.rebased_change import text_lines

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.line_costs import LineCosts

_WHOLE_NUMBER = re.compile(r"(?<![\w.])\d[\d_]*(?![\w.])")


def batch_now(costs: LineCosts, script: Path, text: str) -> BatchPlace | None:
    """None if no number of the text can be told to be the batch size."""
    before = costs.texts.get(str(script))
    place = batch_in_source(before, costs) if before is not None else None
    if before is None or place is None:
        return batch_in_source(text, costs)
    spots = [(place.line, place.column), *((line, column) for line, column, _ in place.also)]
    lines = tuple(LineCost(file=str(script), line=line, function="") for line, _ in spots)
    followed = follow(replace(costs, lines=lines), script, text).lines
    if followed[0].line is None:
        return batch_in_source(text, costs)
    numbers = [
        _same_number(_line(before, line), column, _line(text, now.line), now.line)
        for (line, column), now in zip(spots, followed, strict=True)
        if now.line is not None
    ]
    first = numbers[0]
    if first is None:
        return None
    also = [one for one in numbers[1:] if one is not None and one.value == first.value]
    return BatchPlace(
        line=first.line,
        column=first.column,
        end_column=first.end,
        value=first.value,
        spelling=place.spelling,
        also=tuple((one.line, one.column, one.end) for one in also),
    )


class _BatchNumber(NamedTuple):
    line: int
    column: int
    end: int
    value: int


def _line(text: str, number: int) -> str:
    lines = text_lines(text)
    return lines[number - 1] if number <= len(lines) else ""


def _same_number(before: str, column: int, now: str, line: int) -> _BatchNumber | None:
    """The number at the same place among the line's numbers."""
    old, new = list(_WHOLE_NUMBER.finditer(before)), list(_WHOLE_NUMBER.finditer(now))
    order = next((n for n, one in enumerate(old) if one.start() == column), None)
    if order is None or len(old) != len(new) or int(new[order][0]) < 1:
        return None
    return _BatchNumber(line, new[order].start(), new[order].end(), int(new[order][0]))
