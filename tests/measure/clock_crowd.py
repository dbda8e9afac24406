"""Ranks of one meeting in one process: a store of their own, a thread each."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from clock_bounds import offset_bounds
from stepscope.measure.cluster.clock_meeting import Meeting, MeetingPlace

if TYPE_CHECKING:
    from stepscope.measure.cluster.clock_meeting import MeetingResult

AHEAD_NS = 3_000_000_000


class Store:
    """The job's store, in one process."""

    def __init__(self) -> None:
        self._kept: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self._kept[key] = value

    def get(self, key: str) -> bytes:
        return self._kept[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._kept for key in keys)

    def add(self, key: str, many: int) -> int:
        with self._lock:
            self._kept[key] = str(int(self._kept.get(key, "0")) + many)
            return int(self._kept[key])


class Crowd:
    """Ranks of one meeting, each in its own thread; rank n's clock is n times 3 s ahead."""

    def __init__(self, store: Any, size: int, timeout_s: float = 10.0, key: str = "job/a") -> None:
        self.held: dict[int, MeetingResult] = {}
        self.problems: dict[int, Exception] = {}
        self.seconds: dict[int, float] = {}
        self._arguments = store, "job", key
        self._size, self._timeout_s = size, timeout_s
        self.threads = [threading.Thread(target=self.meet, args=(n,)) for n in range(size)]

    def meet(self, number: int) -> None:
        began = time.monotonic()
        meeting = Meeting(*self._arguments, MeetingPlace(number, self._size), self._timeout_s)
        proposal = 700 if number == 0 else 0
        try:
            now = lambda: time.time_ns() + number * AHEAD_NS  # noqa: E731
            self.held[number] = meeting.hold(5, now, proposal, lambda: None)
        except Exception as error:
            self.problems[number] = error
        self.seconds[number] = time.monotonic() - began

    def all_meet(self) -> Crowd:
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join()
        return self


def check_offsets(crowd: Crowd) -> None:
    for number, held in crowd.held.items():
        low, high = offset_bounds(crowd.held[0].marks, held.marks)
        assert low <= number * AHEAD_NS <= high
