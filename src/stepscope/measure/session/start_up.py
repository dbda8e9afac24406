"""When a rank's start-up came to which point, for rank.json."""

from __future__ import annotations

import time
from typing import Any

_began = (time.time_ns(), time.perf_counter_ns())


def python_began(unix_ns: int, ns: int) -> None:
    """Under `stepscope run`: when Python had just started."""
    global _began
    _began = (unix_ns, ns)


class StartUp:
    """Each mark is set once, in the training thread."""

    def __init__(self, *, from_outside: bool) -> None:
        """`from_outside`: torch's import has just ended; else the script began a watch."""
        now, unix_ns = time.perf_counter_ns(), time.time_ns()
        began_unix_ns, began_ns = _began if from_outside else (unix_ns, now)
        self.began_ns = began_ns
        self._marks = {"began_unix_ns": began_unix_ns}
        if from_outside:
            self._marks["torch_unix_ns"] = unix_ns
        self._group_ns: int | None = None
        self.asks = True  # no batch has been asked for
        self.waits = True  # none has arrived

    def batch_asked_for(self) -> None:
        self.asks = False
        self._mark("first_request_unix_ns")

    def batch_arrived(self) -> None:
        self.waits = False
        self._mark("first_batch_unix_ns")

    def backward_begins(self) -> None:
        self._mark("first_backward_unix_ns")

    def group_took(self, duration_ns: int) -> None:
        self._group_ns = (self._group_ns or 0) + duration_ns

    def content(self) -> dict[str, Any]:
        group = {} if self._group_ns is None else {"group_ns": self._group_ns}
        return {**self._marks, **group}

    def _mark(self, name: str) -> None:
        self._marks.setdefault(name, time.time_ns())
