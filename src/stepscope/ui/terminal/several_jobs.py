"""Several jobs on one screen: what they are, and a line for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

from stepscope.ui.several_jobs import finding_words, short_names, step_words
from stepscope.ui.terminal.console import make_console
from stepscope.ui.terminal.lines import FAINT, cut, labelled, wrapped
from stepscope.ui.terminal.tables import SEVERITY_STYLES
from stepscope.ui.words import short_kernel

if TYPE_CHECKING:
    from stepscope.records.explanation import Explanation
    from stepscope.ui.several_jobs import Several

_MOST_JOBS = 40
_MOST_LINES = 3


def print_several(several: Several, *, width: int | None = None) -> None:
    """The first jobs, in the order given."""
    console = make_console(width)
    answer = several.answer
    out = labelled("verdict", wrapped(answer.verdict, console, _MOST_LINES, "bold"))
    out += labelled("why", wrapped(answer.why, console, _MOST_LINES))
    out += labelled("next", wrapped(answer.next, console, _MOST_LINES))
    for line in [*out, Text(), *_rows(several, console.width)]:
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def _rows(several: Several, width: int) -> list[Text]:
    jobs = several.jobs[:_MOST_JOBS]
    names = [short_kernel(name, max(16, width // 3)) for name in short_names(several.paths)]
    columns = [
        names[: len(jobs)],
        [_device(job) for job in jobs],
        [step_words(job) for job in jobs],
    ]
    widths = [max(map(cell_len, column)) for column in columns]
    rows = []
    for job, *cells in zip(jobs, *columns, strict=True):
        padded = [
            f"{cell}{' ' * (room - cell_len(cell))}"
            for cell, room in zip(cells, widths, strict=True)
        ]
        row = Text("  ".join(padded) + "  ")
        words = cut(finding_words(job), max(1, width - row.cell_len))
        row.append(words, SEVERITY_STYLES[job.findings[0].severity])
        rows.append(row)
    left = len(several.jobs) - len(jobs)
    return [*rows, Text(f"{left} more", style=FAINT)] if left else rows


def _device(job: Explanation) -> str:
    rank = job.ranks[0]
    ranks = f" x {len(job.ranks)}" if len(job.ranks) > 1 else ""
    return f"{rank.device or rank.kind.upper()}{ranks}"
