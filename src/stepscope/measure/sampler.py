"""Python stacks of the training thread, outside the window: where host time goes at almost no cost.

A daemon thread looks at one thread's stack some times a second. It counts its own processor time
and what waking it does to the training, and slows itself down to stay under BUDGET of the time.
Looks fall on round times of the wall clock: a job waits for whichever rank is disturbed, so ranks
that are disturbed together lose that time once, not one after the other.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from stepscope.measure.never_raise import note
from stepscope.measure.writer import started_thread

if TYPE_CHECKING:
    from types import CodeType

BUDGET = 0.001
# Where no core is free, a look also costs the training two switches and some of its caches.
DISTURBANCE_S = 30e-6
DEEPEST = 96
MOST_STACKS = 5000

# Of every frame, innermost first: the identity of its code, and where in it. Files, lines and names
# are worked out once, at the end: hashing a code object means hashing all it holds.
Stack = tuple[int, ...]
Frame = tuple[str, int, str]  # file, line, function


class Sampler:
    """Counts stacks until stopped; `pause` while the profiler has the floor."""

    def __init__(self, thread: int, hz: float) -> None:
        self._thread_id = thread
        self._interval = 1.0 / hz
        self._counts: dict[Stack, int] = {}
        self._codes: dict[int, CodeType] = {}  # keeps them alive, so that identities stay theirs
        self._awake = threading.Event()
        self._awake.set()
        self._stop = threading.Lock()  # held until the end: waiting for it costs less than an Event
        self._stop.acquire()
        self.samples = 0
        self.missed = 0
        self._cost_s = 0.0
        self._watched_s = 0.0
        self._thread = started_thread(self._run, "stepscope-sampler")

    def pause(self) -> None:
        self._awake.clear()

    def resume(self) -> None:
        self._awake.set()

    def close(self) -> dict[str, Any]:
        """Stop and give everything, JSON-ready, the commonest stack first."""
        self._stop.release()
        self._awake.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
        found: Counter[tuple[Frame, ...]] = Counter()
        for stack, count in list(self._counts.items()):
            found[self._frames(stack)] += count
        return {
            "schema": 1,
            "samples": self.samples,
            "not_kept": self.missed,
            "watched_s": self._watched_s,
            "cost_s": self._cost_s,
            "stacks": [
                {"count": count, "frames": [list(frame) for frame in frames]}
                for frames, count in found.most_common()
            ],
        }

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            note("sampler", error)

    def _watch(self) -> None:
        interval = self._interval
        usual = 0.0
        began, spent = time.perf_counter(), time.thread_time()
        while not self._stop.acquire(timeout=interval - time.time() % interval):
            watching = self._awake.is_set()
            if watching:
                self._look()
            else:
                self._awake.wait()
            now, used = time.perf_counter(), time.thread_time()
            if watching:
                cost = used - spent
                self._cost_s += cost
                self._watched_s += now - began
                usual = cost if not usual else usual + (cost - usual) / 8
                interval = _affordable(self._interval, usual + DISTURBANCE_S)
            began, spent = now, used

    def _look(self) -> None:
        frame = sys._current_frames().get(self._thread_id)
        codes = self._codes
        found: list[int] = []
        while frame is not None and len(found) < 2 * DEEPEST:
            code = frame.f_code
            place = id(code)
            codes[place] = code
            found += (place, frame.f_lasti)
            frame = frame.f_back
        if not found:
            return
        self.samples += 1
        stack = tuple(found)
        if stack in self._counts or len(self._counts) < MOST_STACKS:
            self._counts[stack] = self._counts.get(stack, 0) + 1
        else:
            self.missed += 1

    def _frames(self, stack: Stack) -> tuple[Frame, ...]:
        """Outermost first; frames of our own are left out."""
        found = []
        for place, instruction in zip(stack[-2::-2], stack[::-2], strict=True):
            code = self._codes[place]
            if "/stepscope/measure/" not in code.co_filename:
                found.append((code.co_filename, _line(code, instruction), code.co_qualname))
        return tuple(found)


def _affordable(interval: float, cost_s: float) -> float:
    """The interval, doubled until looks at this cost are within the budget: few values, so that
    ranks agree on one."""
    while interval * BUDGET < cost_s and interval < 1.0:
        interval *= 2
    return interval


def _line(code: CodeType, instruction: int) -> int:
    lines = code.co_lines()
    found = (line for start, end, line in lines if start <= instruction < end)
    return next(found, None) or code.co_firstlineno
