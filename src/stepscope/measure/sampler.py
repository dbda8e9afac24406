"""Python stacks of the training thread, outside the window: where host time goes at almost no cost.

A daemon thread looks at one thread's stack some times a second. It measures what a look costs and
slows itself down to stay under BUDGET of the time.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from stepscope.measure.harmless import note

if TYPE_CHECKING:
    from types import CodeType, FrameType

BUDGET = 0.002
DEEPEST = 96
MOST_STACKS = 5000

Stack = tuple[tuple["CodeType", int], ...]


class Sampler:
    """Counts stacks until stopped; `pause` while the profiler has the floor."""

    def __init__(self, thread: int, hz: float) -> None:
        self._thread_id = thread
        self._interval = 1.0 / hz
        self._counts: dict[Stack, int] = {}
        self._paused = threading.Event()
        self._stop = threading.Event()
        self.samples = 0
        self.missed = 0
        self._cost_s = 0.0
        self._watched_s = 0.0
        self._thread = threading.Thread(target=self._run, name="stepscope-sampler", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        self._paused.set()

    def resume(self) -> None:
        self._paused.clear()

    def close(self) -> dict[str, Any]:
        """Stop and give everything, JSON-ready, the commonest stack first."""
        self._stop.set()
        self._thread.join(timeout=2)
        stacks = sorted(self._counts.items(), key=lambda pair: -pair[1])
        return {
            "schema": 1,
            "samples": self.samples,
            "not_kept": self.missed,
            "watched_s": self._watched_s,
            "cost_s": self._cost_s,
            "stacks": [
                {
                    "count": count,
                    "frames": [[code.co_filename, line, code.co_qualname] for code, line in stack],
                }
                for stack, count in stacks
            ],
        }

    def _run(self) -> None:
        interval = self._interval
        try:
            while not self._stop.wait(interval):
                if self._paused.is_set():
                    continue
                began = time.perf_counter()
                self._look()
                cost = time.perf_counter() - began
                self._cost_s += cost
                self._watched_s += interval
                interval = max(self._interval, min(1.0, cost / BUDGET))
        except Exception as error:
            note("sampler", error)

    def _look(self) -> None:
        frame = sys._current_frames().get(self._thread_id)
        stack = _walk(frame)
        del frame
        if not stack:
            return
        self.samples += 1
        if stack in self._counts or len(self._counts) < MOST_STACKS:
            self._counts[stack] = self._counts.get(stack, 0) + 1
        else:
            self.missed += 1


def _walk(frame: FrameType | None) -> Stack:
    """Outermost first; frames of our own are left out."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < DEEPEST:
        code = frame.f_code
        if "/stepscope/measure/" not in code.co_filename:
            found.append((code, frame.f_lineno or 0))
        frame = frame.f_back
    return tuple(reversed(found))
