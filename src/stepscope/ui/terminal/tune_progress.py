"""A tune's progress on stderr: one line that changes in a terminal, a line per trial elsewhere."""

from __future__ import annotations

import shutil
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stepscope.ui.say import say
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

_WIPE = "\r\x1b[2K"


class TuneProgress:
    """`news` stays on the screen, what is being tried is replaced by what comes next."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._redraws = not quiet and sys.stderr.isatty()

    def news(self, words: str) -> None:
        if not self._quiet:
            self._draw("")
            say(words)

    def trying(self, words: str) -> None:
        if self._redraws:
            self._draw(one_line(words)[: shutil.get_terminal_size().columns - 1])
        else:
            self.news(words)

    def wipe(self) -> None:
        self._draw("")

    def _draw(self, words: str) -> None:
        if self._redraws:
            sys.stderr.write(_WIPE + words)
            sys.stderr.flush()


@contextmanager
def shown_trials(*, quiet: bool) -> Iterator[TuneProgress]:
    """The line is wiped at the end, however that comes."""
    progress = TuneProgress(quiet=quiet)
    try:
        yield progress
    finally:
        progress.wipe()
