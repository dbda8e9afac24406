"""Lines to disk in the background: the training thread only appends to a queue.

Every line reaches the operating system within FLUSH_S, whole, so a kill costs at most that much.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from stepscope.measure.harmless import note

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterable
    from pathlib import Path

FLUSH_S = 0.5


class AsLines(Protocol):
    """Runs in the writer's thread; may keep rows back until a later call, never beyond the last."""

    def __call__(self, rows: list[Any], *, last: bool) -> list[str]: ...


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """In one write, unbuffered: nothing of a line stays behind in this process."""
    data = "".join(f"{line}\n" for line in lines).encode()
    with path.open("ab", buffering=0) as file:
        if file.write(data) != len(data):
            raise OSError("the disk is full")


class LineWriter:
    """Empties a queue into one file from a daemon thread."""

    def __init__(self, path: Path, queue: deque[Any], as_lines: AsLines) -> None:
        """Others append to `queue` as they like; without a limit of its own it has none."""
        self._path = path
        self._queue = queue
        self._as_lines = as_lines
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="stepscope-writer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is left; at most a few seconds."""
        self._stop.set()
        self._thread.join(timeout=5)
        self._drain(last=True)

    def _run(self) -> None:
        # On round times of the wall clock: the ranks of a job lose this time together.
        while not self._stop.wait(FLUSH_S - time.time() % FLUSH_S):
            self._drain()

    def _drain(self, *, last: bool = False) -> None:
        with self._lock:
            rows = [self._queue.popleft() for _ in range(len(self._queue))]
            if self._failed:
                return
            try:
                lines = self._as_lines(rows, last=last)
            except Exception as error:
                note("writer", error)
                return
            try:
                if lines:
                    append_lines(self._path, lines)
            except OSError as error:
                self._failed = True
                note(f"writing {self._path.name}", error)
