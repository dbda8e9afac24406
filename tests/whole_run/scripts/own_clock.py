"""A script's own clock: when each step ended, and what the planted cause took inside it.

It uses the standard library alone and shares no code with what it is compared against.
"""

from __future__ import annotations

import contextlib
import json
import os
import time


class OwnClock:
    """Call `step` when a step ends, and put what is planted inside `plants`."""

    def __init__(self):
        self._began = time.perf_counter()
        self._ends = []
        self._planted = []
        self._pending = 0.0
        self._events = 0

    def add(self, seconds):
        """The planted cause took this long since the last step ended."""
        self._pending += seconds
        self._events += 1

    @contextlib.contextmanager
    def plants(self):
        began = time.perf_counter()
        yield
        self.add(time.perf_counter() - began)

    def step(self):
        self._ends.append(time.perf_counter())
        self._planted.append(self._pending)
        self._pending = 0.0

    def say(self, **facts):
        """One line of JSON, also of each rank; times in milliseconds. What was planted after the
        last step is no step's: `after_ms`."""
        starts = [self._began, *self._ends]
        truth = {
            "steps": len(self._ends),
            "step_ms": [1e3 * (b - a) for a, b in zip(starts, self._ends, strict=False)],
            "planted_ms": [1e3 * seconds for seconds in self._planted],
            "events": self._events,
            "after_ms": 1e3 * self._pending,
            "loop_ms": 1e3 * (time.perf_counter() - self._began),
            "rank": int(os.environ.get("RANK", "0")),
            **facts,
        }
        print(json.dumps(truth), flush=True)
