"""Show progress on stderr: bars for bytes and shares, one line per trial.

Silent or brief when stderr is no terminal.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from stepscope.text.figures import size
from stepscope.ui.say import say
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from stepscope.trace.files import Progress

    ShowShare = Callable[[str, float], None]
    _Draw = Callable[[str, float, str], None]

_SHOW_AFTER_S = 1.0
_EVERY_S = 0.1
_WIDTH = 24


_listener: ContextVar[Progress | None] = ContextVar("progress", default=None)


@contextmanager
def reporting_to(listener: Progress) -> Iterator[None]:
    """Meanwhile a program hears of the bytes that are read, instead of a bar on stderr."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def shown_progress(*, quiet: bool = False, verb: str = "reading") -> Iterator[Progress | None]:
    """Gives a callback (bytes read, bytes in all), or None if nobody would see the bar."""
    if (listener := _listener.get()) is not None:
        yield listener
        return
    began = last = time.monotonic()
    draw: _Draw | None

    def progress(read: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if draw and now - began >= _SHOW_AFTER_S and now - last >= _EVERY_S:
            last = now
            draw(verb, read / total if total else 1.0, f"of {size(total)}")

    with _drawn_bar(quiet=quiet) as draw:
        yield None if draw is None else progress


@contextmanager
def shown_shares(*, quiet: bool = False) -> Iterator[ShowShare]:
    """Gives a callback (what is measured, share of all that is done)."""
    with _drawn_bar(quiet=quiet) as draw:
        yield lambda what, share: draw("measuring", share, what) if draw else None


@contextmanager
def _drawn_bar(*, quiet: bool) -> Iterator[_Draw | None]:
    """Gives a function that draws one line over the last one; the line is wiped at the end."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    drawn = False

    def draw(verb: str, share: float, what: str) -> None:
        nonlocal drawn
        drawn = True
        bar = ("█" * round(_WIDTH * share)).ljust(_WIDTH, "░")
        _redraw(f"{verb} {bar} {share:4.0%} {what}")

    try:
        yield draw
    finally:
        if drawn:
            _redraw("")


def _redraw(words: str) -> None:
    """Write over the line that stands there."""
    sys.stderr.write(f"\r\x1b[2K{words}")
    sys.stderr.flush()


# A tune's progress on stderr: one line that changes in a terminal, a line per trial elsewhere.


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
            _redraw(words)


@contextmanager
def shown_trials(*, quiet: bool) -> Iterator[TuneProgress]:
    """The line is wiped at the end, however that comes."""
    progress = TuneProgress(quiet=quiet)
    try:
        yield progress
    finally:
        progress.wipe()
