"""Which processes of the job are watched, how far each came and how it ended: by an
exception, os._exit, a fork or as a Ray worker.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from time import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from stepscope.measure.never_raise import never_raise
from stepscope.measure.patches import replace, when_detached
from stepscope.measure.ranks import rank_and_world
from stepscope.measure.writer import append_lines, started_thread
from stepscope.records.folders import processes_file, this_host

if TYPE_CHECKING:
    from stepscope.measure.settings import Settings

# Which Python processes of the job are watched, and how far each of them came: a file per host.
#
# `run` reads it to say, while the job runs, what was attached and what is missing.

STARTED, TORCH, BACKWARD, STEP = "started", "torch", "backward", "step"
FORKED = "forked"  # a process forked from a watched one trains: it is not captured
FAILED = "failed"  # an exception ended the process
_LONGEST_COMMAND = 400  # characters of a command line


@never_raise
def record(folder: str, event: str, **facts: Any) -> None:
    """One line, in one write: many processes share the file."""
    line = {
        "event": event,
        "pid": os.getpid(),
        "host": this_host(),
        "unix": time(),
        "command": " ".join(sys.orig_argv)[:_LONGEST_COMMAND],
        **facts,
    }
    with contextlib.suppress(OSError):
        line["stderr"] = os.readlink("/proc/self/fd/2")  # noqa: PTH115
    file = processes_file(Path(folder), this_host())
    try:
        append_lines(file, [json.dumps(line)])
    except FileNotFoundError:  # the first process of a host that does not share the disk
        file.parent.mkdir(parents=True, exist_ok=True)
        append_lines(file, [json.dumps(line)])


# How a process leaves: what is kept of an exception that ends it, and of steps before os._exit.
#
# Nothing is caught and nothing printed: the interpreter keeps the exception that ends it, and calls
# exit handlers afterwards.

LAST_WAIT_S = 0.5  # before os._exit
_LONGEST_MESSAGE = 300  # characters of a message
# An exception of another process comes as text: mp.spawn's, a data loader worker's.
_REMOTE = "Traceback (most recent call last)"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$', re.M)
_LIBRARIES = tuple(
    path + os.sep
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_paths().get(name))
)

Line = tuple[str, int, str]  # file, line, function


class RunningSession(Protocol):
    """The session as parts below it see it."""

    settings: Settings
    thread: int  # that trains

    @property
    def number(self) -> int:
        """Of the running step."""

    def wake(self, step: int) -> None: ...
    def close(self, *, at_once: bool = False) -> None: ...


@never_raise
def record_exception(folder: str, steps: int) -> None:
    """At exit: the exception that ends this process, if one does. One without steps is no rank."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    traceback = getattr(sys, "last_traceback", None)
    if error is None and (error := sys.exc_info()[1]) is not None:
        traceback = error.__traceback__
    if error is None or isinstance(error, KeyboardInterrupt | SystemExit):
        return
    words, place = describe_exception(error, traceback)
    file, line, function = place or (None, None, None)
    record(
        folder,
        FAILED,
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
        return lines[-1][:_LONGEST_MESSAGE], _innermost(frames)
    first = message.strip().split("\n", 1)[0]
    words = f"{type(error).__name__}: {first}" if first else type(error).__name__
    frames = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append((code.co_filename, traceback.tb_lineno, code.co_qualname))
        traceback = traceback.tb_next
    return words[:_LONGEST_MESSAGE], _innermost(frames)


def _innermost(frames: list[Line]) -> Line | None:
    own = [frame for frame in frames if not is_library(frame[0])]
    return own[-1] if own else frames[-1] if frames else None


def is_library(file: str) -> bool:
    return file.startswith(("<", *_LIBRARIES)) or "-packages" in file


@never_raise
def watch_leaving(session: RunningSession) -> None:
    """Keep the exception that ends the process, and the steps before os._exit."""
    pid = os.getpid()

    def ends() -> None:
        if os.getpid() == pid:
            record_exception(session.settings.folder, session.number)

    atexit.register(ends)
    when_detached(lambda: atexit.unregister(ends))
    watch_exit(session)


def is_child() -> bool:
    """Whether multiprocessing has started this process."""
    process = sys.modules.get("multiprocessing.process")
    is_known = process is not None and process.parent_process() is not None
    return is_known or "--multiprocessing-fork" in sys.orig_argv


@never_raise
def watch_end_of_child(session: RunningSession) -> None:
    """multiprocessing prints the exception of a child itself: only its own exit handlers see it.
    It forgets those from before the child's own work began."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None and is_child():
        folder = session.settings.folder
        util.Finalize(None, lambda: record_exception(folder, session.number), exitpriority=1)


@never_raise
def watch_exit(session: RunningSession) -> None:
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
def _write_rest(session: RunningSession) -> None:
    """For half a second at most. The profiler would have to be stopped by the thread that started
    it: a window that runs is given up."""
    close = functools.partial(session.close, at_once=True)
    thread = started_thread(close, "stepscope-leaving")
    if thread is not None:
        thread.join(timeout=LAST_WAIT_S)


# A child forked from a training that was profiled ends without C++ destructors.
#
# Kineto's destructor waits for a thread that only the parent has. A child that ends like any
# program (not by os._exit, as multiprocessing's do) would hang there forever; torch 2.13's own
# profiler alone causes it too.


@never_raise
def end_without_destructors() -> None:
    """Call in the child. Python's exit handlers still run, and C's output is still flushed."""
    libc = ctypes.CDLL(None)
    # glibc calls it with the exit code, before everything the parent registered.
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    atexit.register(libc.fflush, None)


# Inside a Ray worker: close the rank when its training ends.
#
# Ray kills its workers, so nothing runs at their exit. Ray Train runs the training in a thread of
# its own; when that thread has ended, the process is still there for a moment.

_PROGRAM = "default_worker.py"
_LONGEST_S = 5.0


class TrainingThread:
    """Made in the thread that trains. Does nothing outside Ray, or in a process's main thread."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._training = threading.current_thread()
        self._closing: threading.Thread | None = None
        if (
            any(word.endswith(_PROGRAM) for word in sys.argv[:1])
            and self._training is not threading.main_thread()
        ):
            self._closing = started_thread(lambda: self._close_after(close), "stepscope-end")

    def _close_after(self, close: Callable[[], None]) -> None:
        self._training.join()
        close()

    @never_raise
    def wait_until_closed(self) -> None:
        """The process group is destroyed, and Ray kills the process after that."""
        closing = self._closing
        if closing is not None and not self._training.is_alive():
            closing.join(_LONGEST_S)
