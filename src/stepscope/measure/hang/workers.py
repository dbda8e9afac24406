"""Stacks of data loader workers: each writes its own when the rank's watch asks.

A worker is usually forked while its loader's iterator is created, and shares a page of memory with
the rank. A thread of its own looks at that page twice a second, without a call of the system.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from stepscope.measure import folder as layout
from stepscope.measure.hang import evidence
from stepscope.measure.never_raise import never_raise
from stepscope.measure.writer import started_thread
from stepscope.records.folders import HANG_REQUEST, HOSTS, this_host

_PAUSE_S = 0.5
_ANSWER_S = 1.5
_LOOK_S = 0.05
_MOST_BYTES = 4 << 20
_MOST_ASKED = 250  # a page's byte counts the questions


class WorkerStacks:
    """One object on both sides of the fork."""

    def __init__(self, run: str) -> None:
        self._run = Path(run)
        self._page: mmap.mmap | None = None
        self._rank_pid = os.getpid()
        self._begun = False

    @never_raise
    def share(self) -> None:
        """In the rank, before its first loader starts workers."""
        if self._page is None:
            self._page, self._rank_pid = mmap.mmap(-1, mmap.PAGESIZE), os.getpid()

    @never_raise
    def begin(self) -> None:
        """In a worker, before it makes batches."""
        if self._begun or (self._page is not None and os.getpid() == self._rank_pid):
            return
        self._begun = True
        started_thread(self._answer, "stepscope-worker")

    @never_raise
    def _answer(self) -> None:
        answered = self._asked()
        while True:
            sleep(_PAUSE_S)
            if (asked := self._asked()) != answered:
                answered = asked
                main = threading.main_thread().ident or 0
                layout.try_write_json(self._file(os.getpid()), evidence.threads(main, {}))

    def _asked(self) -> float:
        """A worker that was spawned shares no page: it looks at the job's request."""
        if self._page is not None:
            return self._page[0]
        try:
            return (self._run / HANG_REQUEST).stat().st_mtime
        except OSError:
            return 0.0

    def _file(self, pid: int) -> Path:
        return self._run / HOSTS / f".worker-{this_host()}.{pid}.json"

    # In the rank.

    def ask(self) -> None:
        """Let the workers write while this process looks at other things."""
        if self._page is not None:
            self._page[0] = (self._page[0] + 1) % _MOST_ASKED

    def collect(self, children: list[dict[str, Any]]) -> None:
        """Add the stacks that came, and wait a little for the others."""
        until = monotonic() + _ANSWER_S
        waiting = list(children) if self._page is not None else []
        if not (self._run / HOSTS).is_dir():
            return
        while waiting:
            waiting = [child for child in waiting if not self._take(child)]
            if monotonic() >= until:
                break
            sleep(_LOOK_S)

    def _take(self, child: dict[str, Any]) -> bool:
        file = self._file(int(child["pid"]))
        with contextlib.suppress(OSError, ValueError):
            if file.stat().st_size <= _MOST_BYTES:
                child["threads"] = json.loads(file.read_text())
            layout.remove(file)
            return True
        return False
