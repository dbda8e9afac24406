"""The console everything is printed to: names from files are printed as plain text."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderHook
from rich.segment import Segment
from rich.text import Text

from stepscope.ui.words import one_line, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from rich.console import ConsoleOptions, ConsoleRenderable, RenderableType

_WIDTH_WITHOUT_TERMINAL = 100
_NARROWEST = 60


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
            yield from _trimmed(line)
            if number < len(lines) or not ends_open:
                yield Segment.line()


def _trimmed(line: list[Segment]) -> list[Segment]:
    while line and not (text := line[-1].text.rstrip(" ")):
        line = line[:-1]
    return [*line[:-1], Segment(text, line[-1].style)] if line else []


class _WithoutTrailingBlanks(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Trimmed(one) for one in renderables]


def text_line(words: str, style: str = "") -> Text:
    """One line of text that may hold names from outside."""
    return Text(one_line(words), style=style)


def note_line(note: str) -> Text:
    return text_line(f"note  {note}", style="bright_black")


def print_path(console: Console, label: str, path: Path | None) -> None:
    """Where a file was written, if one was; never broken over lines, so that it can be copied."""
    if path:
        console.print(Text.assemble(label, (one_line(str(path)), "bold")), soft_wrap=True)


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
