"""What was tried on the step, in a few lines: what helps, with numbers, and what does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.records.figures import interval, significant
from stepscope.ui.advice import not_helping
from stepscope.ui.terminal.console import text_line
from stepscope.ui.terminal.tables import titled_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from stepscope.records.explanation import Advice

_MOST = 5


def advice_table(advice: Sequence[Advice]) -> Table:
    """The best first; `whatif` tells more of each."""
    helping = [each for each in advice if each.verdict == "faster"]
    table = titled_table("what-ifs, predicted", ">saves", ">step becomes", "what")
    for each in helping[:_MOST]:
        text = text_line(each.label)
        text.append(f"  --set {each.setting}", style="bright_black")
        table.add_row(
            f"{significant(each.saved_ms)} ms",
            f"{significant(each.predicted_ms)} ms ({interval(each.low_ms, each.high_ms)})",
            text,
        )
    for note in not_helping(advice):
        table.add_row("", "", text_line(note, style="bright_black"))
    return table
