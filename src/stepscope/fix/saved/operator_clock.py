"""Times what runs on a device: on a GPU by events that are read later, else by the clock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


# The GPU is kept busy for a quarter of a millisecond while the host prepares what is timed.
_BUSY_CYCLES = 500_000
_CACHED_BYTES = 1 << 19
_READ, _WRITTEN = bytes(_CACHED_BYTES), bytearray(_CACHED_BYTES)


def disturb_caches(device: torch.device) -> None:
    """On a CPU, other operators run before a real one: what is timed alone would be too fast."""
    if device.type == "cpu":
        _WRITTEN[:] = _READ


class OperatorClock:
    """`took_ns` has one entry for each pair of `start` and `stop`; on a GPU `issued_ns` has what it
    took the host to ask for the work."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[tuple[Any, Any]] = []
        self._took_ns: list[int] = []
        self._cuda = device.type == "cuda"
        self._began: Any = None
        self._asked_ns = 0
        self.issued_ns: list[int] = []

    def start(self) -> None:
        if self._cuda:
            torch.cuda._sleep(_BUSY_CYCLES)
        self._began = self._event() if self._cuda else time.perf_counter_ns()
        self._asked_ns = time.perf_counter_ns() if self._cuda else 0

    def stop(self) -> None:
        if self._cuda:
            self.issued_ns.append(time.perf_counter_ns() - self._asked_ns)
            self._events.append((self._began, self._event()))
        else:
            self._took_ns.append(time.perf_counter_ns() - self._began)

    def took_ns(self) -> list[int]:
        if self._cuda:
            torch.cuda.synchronize()
            return [round(began.elapsed_time(ended) * 1e6) for began, ended in self._events]
        return self._took_ns

    def _event(self) -> Any:
        make: Callable[..., Any] = torch.cuda.Event
        event = make(enable_timing=True)
        event.record()
        return event
