"""The answer of `hang` on one screen, and in the few lines that `run` prints."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from stepscope.records.hang import HangAnswer, HangingRanks
from stepscope.text.words import counted, short_ranges
from stepscope.ui.terminal.console import (
    FAINT,
    LABELS,
    cut,
    labelled,
    make_console,
    note_line,
    text_line,
    wrapped,
)
from stepscope.ui.words import one_line

_MOST_GROUPS, _MOST_WHY, _MOST_NOTES, _MOST_LAST = 10, 4, 3, 8
_LINES = 6  # of the verdict
_STYLES = {"none": "bold green", "slow": "bold yellow"}


def print_hang(answer: HangAnswer, folder: Path, width: int | None = None) -> None:
    console = make_console(width)
    for line in hang_lines(answer, console, folder):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def hang_lines(answer: HangAnswer, console: Console, folder: Path) -> list[Text]:
    """Verdict, why, next; then ranks in the same state, a line each."""
    width = console.width - LABELS
    style = _STYLES.get(answer.kind, "bold red")
    lines = wrapped(one_line(answer.verdict), console, _LINES, style)
    for place, why in enumerate(answer.why[:_MOST_WHY]):
        lines += labelled("" if place else "why", [text_line(cut(one_line(why), width))])
    for place, words in enumerate(answer.last_lines[-_MOST_LAST:]):
        lines += labelled("" if place else "stderr", [text_line(cut(one_line(words), width))])
    for place, words in enumerate(answer.next):
        lines += labelled("" if place else "next", wrapped(words, console, 2))
    if answer.groups:
        lines.append(Text())
        lines += [_row(group, console.width) for group in answer.groups[:_MOST_GROUPS]]
        hidden = answer.groups[_MOST_GROUPS:]
        if hidden:
            ranks = counted(sum(len(group.ranks) for group in hidden), "rank")
            words = f"{counted(len(hidden), 'more group')} of {ranks}: --json lists them"
            lines.append(Text(words, FAINT))
    lines += [note_line(one_line(note.detail)) for note in answer.notes[:_MOST_NOTES]]
    if answer.groups:
        lines.append(Text(cut(f"stacks of all threads: {one_line(str(folder))}", width), FAINT))
    return lines


def _row(group: HangingRanks, width: int) -> Text:
    count = f" ({counted(len(group.ranks), 'rank')})" if len(group.ranks) > 1 else ""
    where = f" at {group.where.short}" if group.where is not None else ""
    text = f"  {group.text}" if group.text else ""
    row = f"{short_ranges(group.ranks, 3):>7}{count}  {group.words}{where}{text}"
    return Text(cut(one_line(row), width), "bold" if group.at_fault else "")
