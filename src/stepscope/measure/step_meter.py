"""What the operating system and the allocator say when a step ends.

The training thread reads raw values and passes them on; the writer's thread works out what changed.
Values are read so rarely that reading stays under BUDGET of the time, and after every step that is
longer than usual. With cold caches a reading takes some 40 us.
"""

from __future__ import annotations

import os
import resource
import sys
from time import perf_counter_ns
from typing import Any

from stepscope.measure.capture_gate import gate
from stepscope.measure.never_raise import never_raise, note

BUDGET = 0.001
LONG = 1.5  # times a usual step
# Smaller changes are not written: their absence means less than this.
FLOORS = {"cpu_wait_ns": 500_000, "major_faults": 1, "retries": 1}
_SCHEDULER, _MEMORY = "/proc/thread-self/schedstat", "/proc/self/statm"

Counters = tuple[bytes | None, int | None]  # schedstat's text, major faults
Memory = bytes | tuple[int, int] | None  # statm's text, or the device's bytes and retries
# When the step began, if that was not where the one before ended; when it ended; memory.
Reading = tuple[Counters | None, Counters, Memory]


class StepMeter:
    """Created in the training thread, which alone calls it."""

    def __init__(self) -> None:
        self._scheduler = _opened(_SCHEDULER)
        self._statm = _opened(_MEMORY)
        self._thread = getattr(resource, "RUSAGE_THREAD", None)
        self._on_device = False
        self._ended = self._due = perf_counter_ns()
        self._usual = 0
        self._cost = sys.maxsize
        self._began: Counters | None = None
        self._failed = False  # to read memory

    def read(self, now: int) -> Reading | None:
        """A step ended at `now`, by the performance counter."""
        wall, usual = now - self._ended, self._usual
        self._ended = now
        self._usual = usual + (min(wall, 2 * usual) - usual) // 8 if usual else wall
        if now < self._due and wall <= LONG * usual:
            return None
        return self._read()

    @never_raise
    def _read(self) -> Reading:
        began_ns = perf_counter_ns()
        began, self._began = self._began, None
        reading = (began, self._counters(), None if self._failed else self._memory())
        ended_ns = perf_counter_ns()
        # The quickest one: on a busy machine others may run in the middle of it.
        self._cost = min(self._cost, ended_ns - began_ns)
        self._due = ended_ns + int(self._cost / BUDGET)
        return reading

    @never_raise
    def restart(self, now: int) -> None:
        """A step begins; what was counted since the last one ended is ours."""
        self._ended = now
        self._began = self._counters()

    def content(self) -> dict[str, Any]:
        """What is read at step ends, for rank.json."""
        return {
            "cpu_wait_ns": self._scheduler is not None,
            "major_faults": self._thread is not None,
            "memory": "device" if self._on_device else "host" if self._statm is not None else None,
            "floors": FLOORS,
        }

    def _counters(self) -> Counters:
        waited = os.pread(self._scheduler, 96, 0) if self._scheduler is not None else None
        if self._thread is None:
            return waited, None
        return waited, resource.getrusage(self._thread).ru_majflt

    def _memory(self) -> Memory:
        try:
            reading = self._device_memory()
            if reading is not None or self._on_device or self._statm is None:
                return reading
            return os.pread(self._statm, 96, 0)
        except Exception as error:
            self._failed = True
            note("memory at step ends", error)
            return None

    def _device_memory(self) -> tuple[int, int] | None:
        """None before CUDA is initialised, and while a graph is captured."""
        cuda: Any = sys.modules["torch"].cuda
        if not cuda.is_initialized() or not gate.lets_through():
            return None
        self._on_device = True
        statistics = sys.modules["torch"]._C._cuda_memoryStats(cuda.current_device())
        allocated = statistics["allocated_bytes"]["all"]["current"]
        return allocated, statistics["num_alloc_retries"]


class Readings:
    """In the writer's thread: what changed between two readings."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        self._page = resource.getpagesize()

    def changes(self, reading: Reading | None) -> dict[str, int]:
        """Of the step that ended with this reading: counters' growth, and memory as it is."""
        if reading is None:
            return {}
        began, ended, memory = reading
        if began is not None:
            self._count(began)
        values = self._count(ended)
        if isinstance(memory, tuple):
            values |= {"allocated_bytes": memory[0], **self._growth("retries", memory[1])}
        elif memory:
            values["allocated_bytes"] = int(memory.split()[1]) * self._page
        return values

    def _count(self, counters: Counters) -> dict[str, int]:
        scheduler, faults = counters
        waited = self._growth("cpu_wait_ns", int(scheduler.split()[1])) if scheduler else {}
        return waited if faults is None else {**waited, **self._growth("major_faults", faults)}

    def _growth(self, name: str, now: int) -> dict[str, int]:
        before = self._before.get(name, now)
        self._before[name] = now
        return {name: now - before} if now - before >= FLOORS[name] else {}


def _opened(path: str) -> int | None:
    """None where the system does not have it, or no more files can be opened."""
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None
