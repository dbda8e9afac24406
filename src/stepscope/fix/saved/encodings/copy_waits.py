"""How long a device waited for copies of offloaded values: noted while plans are tried."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from stepscope.fix.saved.graph_capture import is_capturing

_MOST_WAITS = 4096


class CopyWaits:
    """Each wait is a pair of events with times: just before the computing stream had to wait, and
    at the end of the copy. Where the copy ended first, nobody waited."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: deque[tuple[Any, Any]] | None = None

    @property
    def noting(self) -> bool:
        return self._waits is not None

    def begin(self) -> None:
        """Anew."""
        with self._lock:
            self._waits = deque(maxlen=_MOST_WAITS)

    def end(self) -> None:
        with self._lock:
            self._waits = None

    def note(self, before: Any, complete: Any) -> None:
        with self._lock:
            if self._waits is not None:
                self._waits.append((before, complete))

    def waited_ns(self) -> int:
        """Since `begin`, as far as it is over; the host does not wait for the rest. 0 while a CUDA
        graph is captured: a question about an event would end the capture."""
        if is_capturing():
            return 0
        with self._lock:
            waits = list(self._waits or ())
        over = [pair for pair in waits if all(event.query() for event in pair)]
        waited_ms = [float(before.elapsed_time(complete)) for before, complete in over]
        return round(sum(max(0.0, one) for one in waited_ms) * 1e6)


COPY_WAITS = CopyWaits()
