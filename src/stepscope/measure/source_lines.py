"""Which line of the user's code runs, by Python's own tracing, and the text of the files
whose lines were marked. Imports no torch: the editor's process loads it.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from stepscope.measure import folder as layout
from stepscope.measure.never_raise import never_raise, note

#     watch = LineWatch(open_mark); watch.begin(); ... the step runs ...; watch.end()
#
# `open_mark(line, running)` is called when a line begins, or was running already when the watch
# began, and returns what closes it again. Marks are nested as the calls are, so the innermost open
# one is the line that runs. Library code is not followed: what it does belongs to the line that
# called it. No tensor is touched and no number is drawn.

# How a mark's name begins in a trace, before file(line): function; the second one for a line that
# was already running when its step began.
MARK, RUNNING = "stepscope line ", "stepscope in line "
MOST_LINES = 50_000  # of one step that are marked: a loop in pure Python runs more
_OWN = Path(__file__).resolve().parents[1]
_INSTALLED = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True)
class UserLine:
    """A line of the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}({self.line}): {self.function}"


class LineWatch:
    """Watches the thread that begins it; a debugger's or a coverage tool's tracing comes first."""

    def __init__(self, open_mark: Callable[[UserLine, bool], Callable[[], None]]) -> None:
        self.files: set[str] = set()
        self._open_mark = open_mark
        self._open: dict[FrameType, tuple[UserLine, Callable[[], None]]] = {}  # outermost first
        self._outer: list[FrameType] = []  # they ran before we began
        self._lines: dict[tuple[CodeType, int], UserLine] = {}
        self._users: dict[CodeType, bool] = {}
        self._marked = 0
        self._begun = False
        self._on = False  # lines are marked; not after an error, or after too many

    def begin(self) -> None:
        """Mark the lines that run now, and every line from here on."""
        if sys.gettrace() is not None:
            note("lines", "a debugger or a coverage tool traces the script; lines are not watched")
            return
        self._marked = 0
        self._outer = [frame for frame in _frames() if self._is_user(frame.f_code)]
        for frame in reversed(self._outer):
            self._mark(frame, running=True)
            frame.f_trace = self._on_event
        self._begun = self._on = True
        sys.settrace(self._on_call)

    def end(self) -> None:
        """Close all marks and trace nothing any more."""
        if not self._begun:
            return
        self._begun = self._on = False
        sys.settrace(None)
        for frame in self._outer:
            frame.f_trace = None
        self._outer = []
        while self._open:
            _, (_, close) = self._open.popitem()
            close()

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        del event, argument
        if not self._on or not self._is_user(frame.f_code):
            return None
        return self._on_event

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> Any:
        """For every line and return of a user's frame; an error here would end the script."""
        del argument
        if not self._on:
            return None
        try:
            if event == "line":
                self._close(frame)
                self._mark(frame)
            elif event == "return":
                self._close(frame)
        except Exception as error:
            self._on = False
            note("lines", error)
            return None
        return self._on_event

    def _mark(self, frame: FrameType, *, running: bool = False) -> None:
        self._marked += 1
        if self._marked > MOST_LINES:
            self._on = False
            note("lines", f"the step runs more than {MOST_LINES} lines: later ones have no mark")
            return
        code, number = frame.f_code, frame.f_lineno
        line = self._lines.get((code, number))
        if line is None:
            file = str(Path(code.co_filename).resolve())
            self.files.add(file)
            line = self._lines[code, number] = UserLine(file, number, code.co_name)
        self._open[frame] = (line, self._open_mark(line, running))

    def _close(self, frame: FrameType) -> None:
        opened = self._open.pop(frame, None)
        if opened is not None:
            opened[1]()

    def _is_user(self, code: CodeType) -> bool:
        known = self._users.get(code)
        if known is None:
            known = self._users[code] = is_user_file(code.co_filename)
        return known


def _stop_in_child() -> None:
    """A forked child does not train: its lines are nobody's."""
    if isinstance(getattr(sys.gettrace(), "__self__", None), LineWatch):
        sys.settrace(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_in_child)


def _frames() -> Iterator[FrameType]:
    """From the caller's outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def running_line() -> UserLine | None:
    """The innermost line of the user's code that runs now."""
    for frame in _frames():
        code = frame.f_code
        if is_user_file(code.co_filename):
            return UserLine(code.co_filename, frame.f_lineno, code.co_name)
    return None


def profiler_mark(line: UserLine, running: bool) -> Callable[[], None]:
    """The line as an event of the profiler."""
    import torch

    mark = torch._C._profiler._RecordFunctionFast(f"{RUNNING if running else MARK}{line}")
    mark.__enter__()
    return functools.partial(mark.__exit__, None, None, None)


@functools.cache
def is_user_file(name: str) -> bool:
    """Not an installed library, not Python's own, not typed in and not stepscope."""
    if name.startswith("<"):
        return False
    path = Path(name).resolve()
    if not _INSTALLED.isdisjoint(path.parts):
        return False
    return not any(path.is_relative_to(folder) for folder in (_OWN, *_python_folders()))


@functools.cache
def _python_folders() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    return tuple({Path(paths[name]).resolve() for name in ("stdlib", "platstdlib")})


# The text of the files whose lines were marked, kept so that later edits can be followed.

SCHEMA = 1
_MOST_FILES = 200
_MOST_BYTES = 1 << 20  # of a file


@never_raise
def write_sources(folder: Path, files: Iterable[str]) -> None:
    """As they are on disk now, right after the step that ran them."""
    texts = {name: text for name in sorted(files)[:_MOST_FILES] if (text := _text(name))}
    layout.try_write_json(folder / layout.LINES, {"schema": SCHEMA, "texts": texts})


def _text(name: str) -> str | None:
    path = Path(name)
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        return path.read_text(errors="replace")
    except OSError:
        return None
