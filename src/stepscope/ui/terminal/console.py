"""Print to a terminal: the console, lines cut to its width, tables, and bars drawn with
characters. Names from files are printed as plain text.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from stepscope.records.normal import median
from stepscope.records.run import STALL_CAUSES, StepSeries
from stepscope.text.figures import percent
from stepscope.text.words import STEP_PARTS
from stepscope.ui.words import Answer, one_line, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.explanation import Budget

    Floats = NDArray[np.float64]

_WIDTH_WITHOUT_TERMINAL = 100
_NARROWEST = 60
LABELS = 10  # columns
FAINT = "bright_black"


class PlainConsole(Console):
    """Square brackets are no markup, and no name can move the cursor or set a colour."""

    def on_broken_pipe(self) -> None:
        """Rich would exit with code 1; the caller decides."""
        raise BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        """Clean the text before its width is measured. Our own texts of several lines are Text."""
        return super().render_str(one_line(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


class _Trimmed:
    """What is printed, without the blanks that pad its lines."""

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        segments = [*console.render(self._renderable, options)]
        if any(segment.control for segment in segments):  # something live
            yield from segments
            return
        lines = [*Segment.split_lines(segments)]
        ends_open = bool(segments) and not segments[-1].text.endswith("\n")
        for number, line in enumerate(lines, 1):
            while line and not (text := line[-1].text.rstrip(" ")):
                line = line[:-1]
            yield from [*line[:-1], Segment(text, line[-1].style)] if line else []
            if number < len(lines) or not ends_open:
                yield Segment.line()


class _WithoutTrailingBlanks(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Trimmed(one) for one in renderables]


def text_line(words: str, style: str = "") -> Text:
    """One line of text that may hold names from outside."""
    return Text(one_line(words), style=style)


def note_line(note: str) -> Text:
    return text_line(f"note  {note}", style=FAINT)


def print_path(console: Console, label: str, path: Path | None) -> None:
    """Where a file was written, if one was; never broken over lines, so that it can be copied."""
    if path:
        console.print(Text.assemble(label, (one_line(str(path)), "bold")), soft_wrap=True)


def print_blocks(console: Console, *blocks: RenderableType) -> None:
    """Print blocks with an empty line between them."""
    for place, block in enumerate(blocks):
        if place:
            console.print()
        console.print(block)


def make_console(width: int | None = None, *, to_stderr: bool = False) -> Console:
    """As wide as the terminal, 100 columns without one, never under 60."""
    if width is None:
        tty = (sys.stderr if to_stderr else sys.stdout).isatty()
        asked = os.environ.get("COLUMNS", "").isdecimal()
        width = shutil.get_terminal_size().columns if tty or asked else _WIDTH_WITHOUT_TERMINAL
    console = PlainConsole(
        width=max(_NARROWEST, width), highlight=False, markup=False, emoji=False, stderr=to_stderr
    )
    console.push_render_hook(_WithoutTrailingBlanks())
    return console


# Lines of a screen: cut to its width, labelled, as many items on each as fit.


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
        short = cut(last, room)
        before, space, _ = short.rstrip("…").rpartition(" ")
        in_a_word = last[len(short) - 1 : len(short)] != " "
        # No word loses a part, unless it is most of the line.
        if short != last and in_a_word and space and cell_len(before) >= room // 2:
            short = before.rstrip(" ,;:(") + "…"
        lines[most - 1 :] = [Text(short, style)]
    return lines


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


# How every table in the terminal looks.

_GAP = 2
_WRAPPED = ("what", "verdict", "transports")  # sentences: they may take several lines

SEVERITY_STYLES = {"high": "bold red", "medium": "yellow", "low": "cyan", "none": "green"}


def answer_grid(answer: Answer, style: str = "bold") -> Table:
    """The first lines of every answer; the caller may add rows."""
    grid = labelled_grid()
    grid.add_row("verdict", text_line(answer.verdict, style=style))
    grid.add_row("why", answer.why)
    grid.add_row("next", answer.next)
    return grid


def labelled_grid(gap: int = _GAP) -> Table:
    """Two columns: a faint label, and what it says."""
    grid = Table.grid(padding=(0, gap))
    grid.add_column(style=FAINT, no_wrap=True)
    grid.add_column()
    return grid


def fitting_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int,
    spare: Sequence[str],
) -> Table:
    """Drop `spare` columns, in their order, until the table fits: no number is ever cut."""
    names = [column.lstrip(">") for column in columns]
    needs = {
        name: _GAP + max(map(cell_len, (name, *(cells[place] for cells in rows))))
        for place, name in enumerate(names)
    }
    for name in spare:
        if sum(needs.values()) > width:
            needs.pop(name, None)
    shown = [place for place, name in enumerate(names) if name in needs]
    rows = [[cells[place] for place in shown] for cells in rows]
    return titled_table(title, *(columns[place] for place in shown), rows=rows)


def titled_table(
    title: str,
    *columns: str,
    rows: Iterable[Sequence[RenderableType]] = (),
    more: str = "",
    folded: Sequence[str] = _WRAPPED,
) -> Table:
    """A column whose name begins with ">" is aligned to the right, as numbers are.

    `more` stands under the table; columns named in `folded` may take several lines.
    """
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        caption=more or None,
        caption_justify="left",
        caption_style=FAINT,
        box=None,
        padding=(0, _GAP, 0, 0),
        header_style=FAINT,
    )
    for column in columns:
        wrapped = column in folded
        table.add_column(
            column.lstrip(">"),
            justify="right" if column.startswith(">") else "left",
            no_wrap=not wrapped,
            overflow="fold" if wrapped else "ellipsis",
        )
    for cells in rows:
        table.add_row(*cells)
    return table


# Bars drawn with characters: one for the step's parts, one for what memory holds.

COLOURS = {name: part.ansi for name, part in STEP_PARTS.items()}
# A character for each part, for terminals without colours.
FILLS = dict(zip(COLOURS, "█▓▒╳≡░▪·─ ▤▦▧▨▩▥◆◇●○◧◨◫", strict=True))


def draw_bar(parts: Sequence[tuple[float, str, str]], width: int) -> Text:
    """Each part is (share, character, colour); a visible part gets at least one cell."""
    text = Text()
    cells = cells_per_part([share for share, _, _ in parts], width)
    for (_, fill, colour), count in zip(parts, cells, strict=True):
        text.append(fill * count, style=colour)
    return text


def budget_bar(budget: Budget, width: int) -> Text:
    """The whole step across the whole width."""
    parts = [(part.share, FILLS[part.id], COLOURS[part.id]) for part in budget.parts]
    return draw_bar(parts, width)


def draw_legend(
    parts: Sequence[tuple[str, str, str, str, float]], width: int, *, room: int
) -> Table:
    """Each part is (character, colour, label, value, share) and takes `room` columns."""
    columns = max(1, (width + 2) // room)
    grid = Table.grid(padding=(0, 2))
    for _ in range(columns):
        grid.add_column(no_wrap=True)
    cells = [
        Text.assemble(
            (f"{fill} ", colour),
            label,
            (f"{value:>10}{percent(share):>6}", "bold" if share >= 0.1 else ""),
        )
        for fill, colour, label, value, share in parts
    ]
    for i in range(0, len(cells), columns):
        grid.add_row(*cells[i : i + columns])
    return grid


def cells_per_part(shares: list[float], width: int) -> list[int]:
    """Whole cells that add up to the width: the largest remainders get what rounding left."""
    exact = [share * width for share in shares]
    cells = [max(int(value), 1 if value >= 0.5 else 0) for value in exact]
    order = sorted(range(len(cells)), key=lambda i: cells[i] - exact[i])
    for i in order[: max(0, width - sum(cells))]:
        cells[i] += exact[i] > 0
    while sum(cells) > width:
        cells[cells.index(max(cells))] -= 1
    return cells


# Step times over a run in one line of characters, and what made steps stall below it.

_HEIGHTS = "▁▂▃▄▅▆▇█"
# The full height stands for this many typical steps, at least and at most.
_LOWEST_TOP, _HIGHEST_TOP = 3.0, 6.0
# For terminals without colours: data, evaluation, checkpoint, gc, recompile, allocator, waits for
# ranks, operating system, logging, unknown, collecting, generating, without gradients.
LETTERS = dict(zip(STALL_CAUSES, "decgrawolutnf", strict=True))
_NO_STALL = "·"


def draw_steps(series: StepSeries, width: int, last: int | None = None) -> Text:
    """Mean step of equal stretches of the run, or of its `last` steps, in `width` characters.

    Warm-up and our own windows are left out. Stretches with stalls have the colour of the costliest
    cause.
    """
    times, causes = _steady(series, last)
    means = _sums(times, width) / np.maximum(_sums(np.ones(len(times)), width), 1)
    if not len(means):
        return Text()
    typical = max(median(means), 1.0)
    top = min(max(float(means.max()), _LOWEST_TOP * typical), _HIGHEST_TOP * typical)
    heights = np.clip(means / top * len(_HEIGHTS), 0, len(_HEIGHTS) - 1).astype(int)
    return Text.assemble(
        *(
            (_HEIGHTS[height], "" if cause < 0 else COLOURS[f"stall_{STALL_CAUSES[cause]}"])
            for height, cause in zip(heights, _main_causes(times, causes, width), strict=True)
        )
    )


def mark_stalls(series: StepSeries, width: int, last: int | None = None) -> Text:
    """A letter (see LETTERS) below each stretch that has stalls; empty if none has."""
    times, causes = _steady(series, last)
    main = _main_causes(times, causes, width)
    if all(cause < 0 for cause in main):
        return Text()
    known = [(LETTERS[cause], COLOURS[f"stall_{cause}"]) for cause in STALL_CAUSES]
    return Text.assemble(*((_NO_STALL, FAINT) if cause < 0 else known[cause] for cause in main))


def _steady(series: StepSeries, last: int | None) -> tuple[Floats, NDArray[np.int8]]:
    chosen = np.flatnonzero(~series.window[series.warm_up :]) + series.warm_up
    chosen = chosen[-last:] if last else chosen
    return series.step_ns[chosen].astype(np.float64), series.cause[chosen]


def _sums(values: Floats, width: int) -> Floats:
    """Of equal stretches, one for each character; a short run takes one for each step."""
    count = min(width, len(values))
    starts = np.arange(count) * len(values) // max(count, 1)
    sums: Floats = np.add.reduceat(values, starts) if count else np.empty(0)
    return sums


def _main_causes(times: Floats, causes: NDArray[np.int8], width: int) -> list[int]:
    """For each stretch the cause whose steps took most of it; -1 for none."""
    table = np.array(
        [_sums(np.where(causes == cause, times, 0.0), width) for cause in range(len(STALL_CAUSES))]
    )
    if not table.shape[1]:
        return []
    return [int(cause) for cause in np.where(table.any(axis=0), table.argmax(axis=0), -1)]
