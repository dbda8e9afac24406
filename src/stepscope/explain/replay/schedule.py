"""When would each task run? One pass over the graph, a few operations per task."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.replay.graph import CallKind
from stepscope.explain.replay.steady import step_ends

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stepscope.explain.replay.graph import StepGraph

    Floats = NDArray[np.float64]

STEPS = 4  # the first fill the queue; the last are the steady state


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """Times in nanoseconds from the start of the first step."""

    starts_ns: Floats  # of the last step's tasks
    ends_ns: Floats
    called_ns: Floats  # of the last step's calls
    step_ends_ns: tuple[float, ...]  # host and device both done, by step
    host_ends_ns: tuple[float, ...]

    @property
    def span_ns(self) -> float:
        """First start to last end on the device."""
        return float(self.ends_ns.max() - self.starts_ns.min()) if len(self.ends_ns) else 0.0

    @property
    def step_ns(self) -> float:
        """A step in the steady state."""
        return _steady(self.step_ends_ns)


def replay(graph: StepGraph, steps: int = 1) -> Replay:
    """Repeat the graph `steps` times: the host may run ahead of the device."""
    calls, tasks = graph.calls, graph.tasks
    kinds, gaps, own = calls.kind.tolist(), calls.gap_ns.tolist(), calls.call_ns.tolist()
    tails, awaits = calls.tail_ns.tolist(), calls.awaits
    bounds = np.searchsorted(tasks.call, np.arange(len(calls) + 1)).tolist()
    streams, durations = tasks.stream.tolist(), tasks.dur_ns.tolist()
    spacings, latencies = tasks.spacing_ns.tolist(), tasks.latency_ns.tolist()
    after, delays = tasks.after.tolist(), tasks.after_ns.tolist()
    depth = graph.queue_depth
    free = [0.0] * graph.streams  # when each stream has run what was launched so far
    starts: list[float] = []
    ends: list[float] = []
    called = [0.0] * len(calls)
    now = 0.0
    step_ends: list[float] = []
    host_ends: list[float] = []
    count = len(durations)
    # Looking up names in the loop costs a tenth.
    launch, wait = int(CallKind.LAUNCH), int(CallKind.WAIT)
    for step in range(steps):
        base = step * count
        for number, kind in enumerate(kinds):
            now += gaps[number]
            if kind == launch:
                first = bounds[number]
                behind = base + first - depth
                if behind >= 0 and starts[behind] > now:
                    now = starts[behind]
                called[number] = now
                for task in range(first, bounds[number + 1]):
                    stream = streams[task]
                    begin = now + latencies[task]
                    ready = free[stream] + spacings[task]
                    if ready > begin:
                        begin = ready
                    other = after[task]
                    if other >= 0:
                        begin = max(begin, ends[base + other] + delays[task])
                    starts.append(begin)
                    free[stream] = end = begin + durations[task]
                    ends.append(end)
                now += own[number]
            else:
                called[number] = now
                now += own[number]
                if kind == wait and awaits[number]:
                    done = max([free[stream] for stream in awaits[number]]) + tails[number]
                    now = max(now, done)
        now += graph.end_ns
        host_ends.append(now)
        step_ends.append(max(now, max(free, default=0.0)))
    last = len(starts) - count
    return Replay(
        starts_ns=np.array(starts[last:]),
        ends_ns=np.array(ends[last:]),
        called_ns=np.array(called),
        step_ends_ns=tuple(step_ends),
        host_ends_ns=tuple(host_ends),
    )


def step_ns(graph: StepGraph) -> float:
    """A step of this graph in the steady state."""
    ends = step_ends(graph, STEPS)
    return _steady(ends) if ends else replay(graph, STEPS).step_ns


def _steady(ends: Sequence[float]) -> float:
    """The mean over the last half of the steps."""
    half = len(ends) // 2
    return (ends[-1] - ends[-1 - half]) / half if half else ends[-1]
