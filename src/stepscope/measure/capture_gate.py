"""Whether a CUDA graph is being captured anywhere in this process.

While one is, CUDA refuses many calls of every thread, even the question whether an event has
happened, and the capture fails with them. `is_current_stream_capturing` knows one stream of one
thread. So whatever of ours touches the device asks here first. Threads beside the training keep
captures waiting meanwhile, so that none begins between their question and their call.

Calls of make_graphed_callables count as a whole: the passes before its captures train nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST_S = 1.0  # that a capture waits for a call of ours, which takes microseconds


class CaptureGate:
    """Told of captures by graph_steps.py."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # A graph whose capture was never ended is no longer captured when nobody holds it.
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._forked)

    def begin(self, graph: Any) -> None:
        """Call before the capture begins."""
        held = self._lock.acquire(timeout=_LONGEST_S)
        self._graphs.add(graph)
        if held:
            self._lock.release()

    def end(self, graph: Any) -> None:
        """Call after the capture has ended or failed."""
        self._graphs.discard(graph)

    @property
    def is_capturing(self) -> bool:
        """Whether any thread captures."""
        return len(self._graphs) > 0

    def lets_through(self) -> bool:
        """In the training thread, once CUDA is initialised: whether the device may be touched."""
        if self.is_capturing:
            return False
        return not sys.modules["torch"].cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[bool]:
        """In other threads: whether the device may be touched. No capture begins inside."""
        with self._lock:
            yield not self.is_capturing

    def _forked(self) -> None:
        self._lock = threading.Lock()


gate = CaptureGate()
