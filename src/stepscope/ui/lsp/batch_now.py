"""The number that sets the batch size, in a script that may have been edited since it was measured.

Another literal may equal the measured batch by chance: so the number is looked for in the measured
text, and its line is followed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.records.line_costs import BatchPlace, LineCost
from stepscope.ui.editor import batch_in_source, follow
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
    line = LineCost(file=str(script), line=place.line, function="")
    (followed,) = follow(replace(costs, lines=(line,)), script, text).lines
    if followed.line is None:
        return batch_in_source(text, costs)
    return _same_number(place, _line(before, place.line), _line(text, followed.line), followed.line)


def _line(text: str, number: int) -> str:
    lines = text_lines(text)
    return lines[number - 1] if number <= len(lines) else ""


def _same_number(place: BatchPlace, before: str, now: str, line: int) -> BatchPlace | None:
    """The number at the same place among the line's numbers."""
    old, new = list(_WHOLE_NUMBER.finditer(before)), list(_WHOLE_NUMBER.finditer(now))
    order = next((n for n, one in enumerate(old) if one.start() == place.column), None)
    if order is None or len(old) != len(new) or int(new[order][0]) < 1:
        return None
    return BatchPlace(
        line=line,
        column=new[order].start(),
        end_column=new[order].end(),
        value=int(new[order][0]),
        spelling=place.spelling,
    )
