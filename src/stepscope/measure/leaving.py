"""How a process leaves: what is kept of an exception that ends it, and of steps before os._exit.

Nothing is caught and nothing printed: the interpreter keeps the exception that ends it, and calls
exit handlers afterwards.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import sys
import sysconfig
from typing import TYPE_CHECKING, Any, Protocol

from stepscope.measure import processes
from stepscope.measure.attached import replace, when_detached
from stepscope.measure.never_raise import never_raise
from stepscope.measure.ranks import rank_and_world
from stepscope.measure.writer import started_thread

if TYPE_CHECKING:
    from types import TracebackType

    from stepscope.measure.settings import Settings

LAST_WAIT_S = 0.5  # before os._exit
_LONGEST = 300  # characters of a message
# An exception of another process comes as text: mp.spawn's, a data loader worker's.
_REMOTE = "Traceback (most recent call last)"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$', re.M)
_LIBRARIES = tuple(
    path + os.sep
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_paths().get(name))
)

Line = tuple[str, int, str]  # file, line, function


class LeavingSession(Protocol):
    """What is needed of a session when its process leaves."""

    settings: Settings
    number: int  # of the running step

    def close(self, *, at_once: bool = False) -> None: ...


@never_raise
def record_exception(folder: str, steps: int) -> None:
    """At exit: the exception that ends this process, if one does. One without steps is no rank."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None or isinstance(error, KeyboardInterrupt | SystemExit):
        return
    words, place = describe_exception(error, getattr(sys, "last_traceback", None))
    file, line, function = place or (None, None, None)
    processes.record(
        folder,
        processes.FAILED,
        exception=words,
        file=file,
        line=line,
        function=function,
        steps=steps or None,
        rank=rank_and_world()[0] if steps else None,
    )


def describe_exception(
    error: BaseException, traceback: TracebackType | None
) -> tuple[str, Line | None]:
    """Its last line, and the innermost line of the user's own code."""
    message = str(error)
    if _REMOTE in message:
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        frames = [
            (found["file"], int(found["line"]), found["function"].strip())
            for found in _FRAME.finditer(message)
        ]
        return lines[-1][:_LONGEST], _innermost(frames)
    first = message.strip().split("\n", 1)[0]
    words = f"{type(error).__name__}: {first}" if first else type(error).__name__
    frames = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append((code.co_filename, traceback.tb_lineno, code.co_qualname))
        traceback = traceback.tb_next
    return words[:_LONGEST], _innermost(frames)


def _innermost(frames: list[Line]) -> Line | None:
    own = [frame for frame in frames if not _is_library(frame[0])]
    return own[-1] if own else frames[-1] if frames else None


def _is_library(file: str) -> bool:
    return file.startswith(("<", *_LIBRARIES)) or "-packages" in file


@never_raise
def watch_leaving(session: LeavingSession) -> None:
    """Keep the exception that ends the process, and the steps before os._exit."""
    pid = os.getpid()

    def ends() -> None:
        if os.getpid() == pid:
            record_exception(session.settings.folder, session.number)

    atexit.register(ends)
    when_detached(lambda: atexit.unregister(ends))
    watch_exit(session)


@never_raise
def watch_exit(session: LeavingSession) -> None:
    """os._exit ends a process without exit handlers: write the last steps before. A child that is
    forked later leaves as it would: its steps are this process's."""
    original, pid = os._exit, os.getpid()

    @functools.wraps(original)
    def _exit(*args: Any, **kwargs: Any) -> Any:
        try:
            if os.getpid() == pid and session.number:
                _write_rest(session)
        finally:
            original(*args, **kwargs)

    replace(os, "_exit", _exit)


@never_raise
def _write_rest(session: LeavingSession) -> None:
    """For half a second at most. The profiler would have to be stopped by the thread that started
    it: a window that runs is given up."""
    close = functools.partial(session.close, at_once=True)
    thread = started_thread(close, "stepscope-leaving")
    if thread is not None:
        thread.join(timeout=LAST_WAIT_S)
