"""The loop of `stepscope top`: look at the folder, draw, wait for a key."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from stepscope.explain.whole_run.live import explain_live
from stepscope.ui.terminal.console import make_console
from stepscope.ui.terminal.live import KEYS, PAUSED, live_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.live import Live

    from stepscope.records.live_run import LiveRun
    from stepscope.trace.follow_run import RunFollower

_LEAST_REST = 9  # times as long as a look took: at most a tenth of a core
_LONGEST_REST_S = 60.0
_NARROWEST = 60
_NICER = 10
_QUIT, _PAUSE = ("q", "Q", "\x03", "\x04"), ("p", "P", " ")


def look(follower: RunFollower, before: LiveRun | None = None) -> LiveRun:
    """The run as it is now; `before` is the last look."""
    return explain_live(follower.read(), time.time(), before)


def print_once(follower: RunFollower) -> None:
    _print(make_console(), look(follower))


def show_live(follower: RunFollower, interval: float) -> None:
    """Until the run ends or a key quits; the last screen stays on the terminal."""
    console = make_console()
    if not console.is_terminal or console.is_dumb_terminal:
        _print(console, look(follower))
        return
    _tread_lightly()
    run = look(follower)
    if not run.has_ended:
        with contextlib.suppress(KeyboardInterrupt), _keyboard() as keys, _screen(console) as live:
            for run, hint in _follow(follower, run, keys, interval):  # noqa: B020
                _draw(live, run, hint)
    _print(console, run)


def _tread_lightly() -> None:
    """The job comes first."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICER)


def _follow(
    follower: RunFollower, run: LiveRun, keys: _Keys, interval: float
) -> Iterator[tuple[LiveRun, str]]:
    """What to show, and which keys work, until the run ends or a key quits."""
    took = 0.0
    while not run.has_ended:
        yield run, KEYS
        key = keys.wait(max(interval, min(_LEAST_REST * took, _LONGEST_REST_S)))
        if key in _PAUSE:
            yield run, PAUSED
            while not (key := keys.wait(interval)):
                yield run, PAUSED  # the terminal may have another size
        if key in _QUIT:
            return
        began = time.monotonic()
        run = look(follower, run)
        took = time.monotonic() - began
    yield run, ""


def _draw(live: Live, run: LiveRun, keys: str) -> None:
    """As large as the terminal is now."""
    from rich.text import Text

    terminal = shutil.get_terminal_size()
    live.console.width = max(_NARROWEST, terminal.columns)
    live.console.height = terminal.lines
    lines = live_lines(run, live.console.width, terminal.lines, keys=keys)
    live.update(Text("\n").join(lines), refresh=True)


def _print(console: Console, run: LiveRun) -> None:
    for line in live_lines(run, console.width):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


@contextlib.contextmanager
def _screen(console: Console) -> Iterator[Live]:
    """A screen of its own; SIGTERM ends it as Ctrl-C does."""
    from rich.live import Live

    before = signal.signal(signal.SIGTERM, _leave)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            yield live
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: Any) -> None:
    del frame
    sys.exit(128 + number)


class _Keys:
    """Single keys; without a keyboard, only time passes."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def wait(self, seconds: float) -> str:
        """The key that was pressed within this time, or nothing."""
        if self._descriptor is None:
            time.sleep(seconds)
            return ""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return ""
        pressed = os.read(self._descriptor, 64).decode("utf-8", "replace")
        if not pressed:  # the terminal is gone
            return _QUIT[0]
        return next((key for key in pressed if key in (*_PAUSE, *_QUIT)), "")


@contextlib.contextmanager
def _keyboard() -> Iterator[_Keys]:
    """Keys arrive at once and are not shown; the terminal is as before afterwards."""
    import termios
    import tty

    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (AttributeError, OSError, ValueError, termios.error):
        yield _Keys(None)
        return
    tty.setcbreak(descriptor)
    try:
        yield _Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
