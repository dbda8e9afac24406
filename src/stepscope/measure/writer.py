"""Lines to disk in the background: the training thread only appends to a queue.

Every line reaches the operating system whole within the flush interval (FLUSH_S up to 64 ranks), so
a kill loses no more than that.
"""

from __future__ import annotations

import errno
import os
import threading
from time import monotonic, time  # a script may replace those of the module
from typing import TYPE_CHECKING, Any, Protocol

from stepscope.measure.folder import note_unwritten
from stepscope.measure.never_raise import note

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from stepscope.measure.packed_steps import StepPacking

FLUSH_S = 0.5
_RANKS_AT_ONCE, _LONGEST_S = 64, 10.0
PIECE_PAUSE_S = 0.002  # between two pieces of packing, for the training
MOST_UNWRITTEN = 1 << 16  # lines


def flush_interval_s(world_size: int) -> float:
    """Every flush opens the file. So that a file system which all ranks share has to open no more
    than some hundred files a second, ranks of a large job write less often."""
    return min(_LONGEST_S, FLUSH_S * max(1.0, world_size / _RANKS_AT_ONCE))


class AsLines(Protocol):
    """Runs in the writer's thread; may hold rows back until a later call, but not the last one."""

    def __call__(self, rows: list[Any], *, last: bool) -> list[str]: ...


def append_lines(path: Path, lines: Iterable[str], *, alone: bool = False) -> None:
    """In one unbuffered write, so that no part of a line stays in this process.

    With `alone` (no other process writes to the file) either all lines are written or none.
    """
    data = "".join(f"{line}\n" for line in lines).encode()
    with path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        if file.write(data) != len(data):
            if alone:
                file.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def started_thread(work: Callable[[], object], name: str) -> threading.Thread | None:
    """None, with a note, when the system allows no more threads."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        note(name, str(error))
        return None
    return thread


class LineWriter:
    """Empties a queue into one file from a daemon thread."""

    def __init__(
        self,
        path: Path,
        queue: deque[Any],
        as_lines: AsLines,
        packing: StepPacking | None = None,
        *,
        flush_s: float = FLUSH_S,
    ) -> None:
        self._path = path
        self._flush_s = flush_s
        self._packing = packing
        self._queue = queue
        self._as_lines = as_lines
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._unwritten: list[str] = []  # a full disk may have room again
        self.beside: Callable[[], None] | None = None  # done once per flush; never raises
        # Without a thread, lines are written at the end.
        self._thread = started_thread(self._run, "stepscope-writer")

    def close(self) -> None:
        """Write what is left, within a few seconds."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        self._drain(last=True)
        with self._lock:
            if self._packing is not None:
                self._packing.close()

    def _run(self) -> None:
        # At round times of the wall clock, so that all ranks of a job lose this time together.
        while not self._stop.wait(self._flush_s - time() % self._flush_s):
            self._drain()
            self._pack()
            if self.beside is not None:
                self.beside()

    def _pack(self) -> None:
        """Until it is done, or lines wait to be written: that comes first."""
        packing = self._packing
        until = monotonic() + FLUSH_S
        while packing is not None and packing.is_busy and monotonic() < until:
            with self._lock:
                packing.go_on()
            if self._stop.wait(PIECE_PAUSE_S):
                break

    def _drain(self, *, last: bool = False) -> None:
        with self._lock:
            rows = [self._queue.popleft() for _ in range(len(self._queue))]
            try:
                self._unwritten += self._as_lines(rows, last=last)
            except Exception as error:
                note("writer", error)
            if self._unwritten:
                self._write(last=last)

    def _write(self, *, last: bool) -> None:
        try:
            append_lines(self._path, self._unwritten, alone=True)
            if self._packing is not None:
                self._packing.wrote(len(self._unwritten))
        except OSError as error:
            if not last and len(self._unwritten) <= MOST_UNWRITTEN:
                return
            note_unwritten(self._path.name, error)
        del self._unwritten[:]
