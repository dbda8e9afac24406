"""The steps of a workload: its own, from the ones that capture saw, and where each one's
time goes on a processor: it computes, queues for a core, or waits by itself.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from stepscope.measure.machine import ThreadCounters, counters_reader
from stepscope.verify.spread import Floats
from stepscope.verify.steady import steady_steps, without_pauses

# The processor's clock changes how long a step computes, and other programs change how long it
# queues; neither changes how long it sleeps, or waits for a file, a lock or another process. That
# part is nearly zero and steady from start to start, so a longer wait is seen in a few runs.
#
# A thread waits only after it gave its core away. Steps in which it never did so wait zero: what
# they lack in the sum was taken by the hypervisor or by interrupts.

# Of the time: other threads of the process that work longer may be what the step waits for, and
# other programs then change how long that takes.
_MOST_OTHER_THREADS = 0.05
_NS_PER_MS = 1e6


class StepParts(msgspec.Struct, frozen=True, kw_only=True):
    """Each step of a run, in milliseconds."""

    wall: tuple[float, ...] = ()
    computing: tuple[float, ...] = ()
    queue: tuple[float, ...] = ()  # it was ready and had no core
    waiting: tuple[float, ...] = ()  # it gave its core away
    other_threads: tuple[float, ...] = ()  # processor time of the process's other threads


class RunParts(NamedTuple):
    """The mean steady step of a run, in milliseconds."""

    computing_ms: float
    queue_ms: float
    waiting_ms: float


class StepMarks:
    """Reads the counters of the calling thread: once at first, then after each step."""

    def __init__(self, read: Callable[[], ThreadCounters]) -> None:
        self._read = read
        self._marks = [read()]

    @classmethod
    def here(cls) -> StepMarks | None:
        """None where the system does not count."""
        read = counters_reader()
        return cls(read) if read is not None else None

    def step_ended(self) -> None:
        self._marks.append(self._read())

    def parts(self) -> StepParts | None:
        """None if other processes may have worked for this one."""
        if multiprocessing.active_children():
            return None
        return split_steps(self._marks)


def split_steps(marks: Sequence[ThreadCounters]) -> StepParts:
    rows = []
    for before, after in itertools.pairwise(marks):
        grown = ThreadCounters(*(b - a for a, b in zip(before, after, strict=True)))
        rest = max(0, grown.wall_ns - grown.computing_ns - grown.queue_ns)
        rows.append(
            (
                grown.wall_ns,
                grown.computing_ns,
                grown.queue_ns,
                rest if grown.switches else 0,
                max(0, grown.process_ns - grown.computing_ns),
            )
        )
    names = ("wall", "computing", "queue", "waiting", "other_threads")
    columns = zip(*rows, strict=True) if rows else ((),) * len(names)
    return StepParts(
        **{
            name: tuple(ns / _NS_PER_MS for ns in column)
            for name, column in zip(names, columns, strict=True)
        }
    )


def mean_parts(parts: StepParts, last: int) -> RunParts | None:
    """Of the steady ones among the first `last` steps; None if the step may wait for other threads.

    What happens once in a run is left out, as everywhere: it may be a pause of the machine.
    """
    wall = parts.wall[:last]
    first = len(wall) - len(steady_steps(wall))
    if first >= len(wall):
        return None
    steps = slice(first, len(wall))
    if sum(parts.other_threads[steps]) > _MOST_OTHER_THREADS * sum(wall[steps]):
        return None
    queue = parts.queue[steps]
    return RunParts(
        computing_ms=float(without_pauses(parts.computing[steps]).mean()),
        queue_ms=sum(queue) / len(queue),
        waiting_ms=float(without_pauses(parts.waiting[steps]).mean()),
    )


# The workload's own steps from the ones that capture saw.


def captured_per_step(seen: int, trained: int) -> float:
    """Capture ends steps at optimizers: a step that trains a critic five times is five of them."""
    if not seen:
        return 1.0
    return float(round(seen / trained)) if seen >= 1.5 * trained else 1 / round(trained / seen)


def whole_steps(steps_ms: Floats, captured_per_step: float) -> Floats:
    """Sums of the captured steps that make one of the workload's."""
    if captured_per_step <= 1:
        return steps_ms * captured_per_step
    size = round(captured_per_step)
    whole = len(steps_ms) // size * size
    steps: Floats = steps_ms[:whole].reshape(-1, size).sum(axis=1)
    return steps
