"""A progress bar on stderr for reads longer than a second; silent when nobody watches."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.trace.files import Progress

_SHOW_AFTER_S = 1.0
_EVERY_S = 0.1


@contextmanager
def shown_progress(*, quiet: bool = False) -> Iterator[Progress | None]:
    """Gives a callback (bytes read, bytes in all), or None where no one would see it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    began = last = time.monotonic()
    drawn = False

    def progress(read: int, total: int) -> None:
        nonlocal last, drawn
        now = time.monotonic()
        if now - began < _SHOW_AFTER_S or now - last < _EVERY_S:
            return
        last, drawn = now, True
        share = read / total if total else 1.0
        bar = ("█" * round(24 * share)).ljust(24, "░")
        sys.stderr.write(f"\rreading {bar} {share:4.0%} of {total / 1e6:.0f} MB ")
        sys.stderr.flush()

    try:
        yield progress
    finally:
        if drawn:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
