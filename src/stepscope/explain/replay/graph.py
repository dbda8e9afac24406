"""A stretch of training as tasks: what the host calls, what the device runs, what waits for what.

Columns, not objects: an edit is a new array, and a graph of a million tasks is a few arrays.

Host calls are one lane in order of their start. The threads that feed a device take turns (backward
runs on autograd's thread while the main one waits), so one lane holds them all; the time between
two calls is the `gap` of the later one. Device tasks are in order of their calls; on a stream they
run in that order.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int32]
    Flags = NDArray[np.bool_]

QUEUE_DEPTH = 1024  # launches a CUDA stream takes before the host has to wait


class CallKind(IntEnum):
    """What a host call does to the device."""

    PLAIN = 0  # nothing: work of the host alone
    LAUNCH = 1
    WAIT = 2


class Phase(IntEnum):
    """The part of a step that a call belongs to."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    DATA = 3
    OTHER = 4


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """The host's lane. Times are nanoseconds."""

    kind: NDArray[np.int8]
    gap_ns: Floats  # host time since the previous call
    call_ns: Floats  # its own time, without waiting
    tail_ns: Floats  # of a WAIT: from the last awaited task's end to its return
    phase: NDArray[np.int8]
    row: Ints  # host row of the call in the trace, -1 for an inserted one
    operator: Ints  # host row of the outermost operator around it, or -1
    frames: Floats  # Python functions the profiler recorded in the gap
    awaits: tuple[tuple[int, ...], ...]  # the streams each call waits for

    def __len__(self) -> int:
        return len(self.gap_ns)


class Tasks(msgspec.Struct, frozen=True, kw_only=True):
    """What the device runs, in order of the calls."""

    call: Ints  # the call that launched it
    stream: Ints
    dur_ns: Floats
    spacing_ns: Floats  # from the end of the previous task on its stream to its start
    latency_ns: Floats  # from its call to its start, on a free stream
    kind: NDArray[np.int8]  # explain.work.Kind
    row: Ints  # device row in the trace (host row if `on_host`), -1 for an inserted one
    after: Ints  # a task of another stream that must have ended, or -1
    after_ns: Floats  # how long before this one's start

    def __len__(self) -> int:
        return len(self.dur_ns)


class StepGraph(msgspec.Struct, frozen=True, kw_only=True):
    """Calls, tasks, and what the host does after the last call."""

    calls: Calls
    tasks: Tasks
    streams: int
    end_ns: float  # host time between the last call and the end
    queue_depth: int = QUEUE_DEPTH
    on_host: bool = False  # the CPU is the device

    @property
    def size(self) -> int:
        return len(self.calls) + len(self.tasks)

    @property
    def host_ns(self) -> float:
        """What the host needs when it never waits for the device."""
        calls = self.calls
        return float(calls.gap_ns.sum() + calls.call_ns.sum() + self.end_ns)

    @property
    def device_ns(self) -> float:
        """What the busiest stream needs when it never waits for the host."""
        tasks = self.tasks
        if not len(tasks):
            return 0.0
        busy = np.bincount(tasks.stream, tasks.dur_ns + tasks.spacing_ns, self.streams)
        return float(busy.max())
