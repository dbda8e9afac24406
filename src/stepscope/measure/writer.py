"""Lines to disk in the background: the training thread only appends to a list.

Every line reaches the operating system within FLUSH_S, whole, so a kill costs at most that much.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

from stepscope.measure.harmless import note

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FLUSH_S = 0.25


class LineWriter:
    """Append JSON lines to one file from a daemon thread."""

    def __init__(self, path: Path, prepare: Callable[[Any], Any | None] = lambda row: row) -> None:
        """`prepare` runs in the thread; None means not yet (the row and those behind it wait)."""
        self._path = path
        self._prepare = prepare
        self._rows: list[Any] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="stepscope-writer", daemon=True)
        self._thread.start()

    def put(self, row: Any) -> None:
        """Called on the hot path: no I/O, no lock held long."""
        if not self._failed:
            self._rows.append(row)

    def close(self) -> None:
        """Write what is left; at most a few seconds."""
        self._stop.set()
        self._thread.join(timeout=5)
        self._drain(last=True)

    def _run(self) -> None:
        while not self._stop.wait(FLUSH_S):
            self._drain()

    def _drain(self, *, last: bool = False) -> None:
        with self._lock:
            lines = []
            while self._rows:
                try:
                    ready = self._prepare(self._rows[0])
                except Exception as error:
                    note("writer", error)
                    ready = {}
                if ready is None and not last:
                    break
                self._rows.pop(0)
                if ready:
                    lines.append(json.dumps(ready))
            if not lines or self._failed:
                return
            try:
                with self._path.open("a") as file:
                    file.write("\n".join(lines) + "\n")
            except OSError as error:
                self._failed = True
                note(f"writing {self._path.name}", error)
