"""Progress bars on stderr; silent when stderr is no terminal."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stepscope.records.figures import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stepscope.trace.files import Progress

    ShowShare = Callable[[str, float], None]
    _Draw = Callable[[str, float, str], None]

_SHOW_AFTER_S = 1.0
_EVERY_S = 0.1
_WIDTH = 24


@contextmanager
def shown_progress(*, quiet: bool = False, verb: str = "reading") -> Iterator[Progress | None]:
    """Gives a callback (bytes read, bytes in all), or None if nobody would see the bar."""
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
        sys.stderr.write(f"\r\x1b[2K{verb} {bar} {share:4.0%} {what}")
        sys.stderr.flush()

    try:
        yield draw
    finally:
        if drawn:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
