"""What was tried on the step, in a few lines: what helps, with numbers, and what does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.records.figures import interval, milliseconds
from stepscope.ui.advice import not_helping
from stepscope.ui.terminal.console import text_line
from stepscope.ui.terminal.tables import titled_table
from stepscope.ui.words import one_line, or_dash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from stepscope.records.explanation import Advice

_MOST = 5


def advice_table(advice: Sequence[Advice]) -> Table:
    """The best first; `whatif` tells more of each."""
    helping = [change for change in advice if change.verdict == "faster"]
    table = titled_table("what-ifs, predicted", "gain", ">step becomes", "what")
    for change in helping[:_MOST]:
        text = text_line(change.label)
        if change.tried is not None:
            text.append(f"  {change.tried.label}: {one_line(change.tried.words)}")
            saved = change.tried.saved(change.tried.measured_ms)
            table.add_row(or_dash(saved, milliseconds), "", text)
            continue
        text.append(f"  --set {change.setting}", style="bright_black")
        ends = interval(change.low_ms, change.high_ms)
        step = f"{milliseconds(change.predicted_ms)} ({ends})"
        table.add_row(" ".join(filter(None, change.gain.words())), step, text)
    for note in not_helping(advice):
        table.add_row("", "", text_line(note, style="bright_black"))
    return table
