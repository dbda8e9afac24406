"""Replay a step's graph: when each task would run, and how long a step takes in the steady
state.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from stepscope.step.arrays import Floats, Indices
from stepscope.step.graph import CallKind, StepGraph
from stepscope.trace.links import distinct

# When would each task run? One pass over the graph, a few operations per task.

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


# The length of a step in the steady state, by running maxima instead of a loop over the tasks.
#
# It gives the same result as `schedule.replay`. Between two calls that wait for the device, the
# host's lane and each stream are running maxima. When a full queue holds the host back, or a stream
# waits for another, they are repeated until nothing changes.

# A stretch between two waits costs as much as this many turns of the loop.
_TASKS_A_WAIT = 100
_MOST_PASSES = 32  # per stretch: streams that alternate more often are left to the loop


def step_ends(graph: StepGraph, steps: int) -> list[float] | None:
    """When host and device are both done, for each of `steps` repetitions of the graph.

    None if the loop is faster.
    """
    calls = graph.calls
    waits = [
        number
        for number in np.flatnonzero(calls.kind == CallKind.WAIT).tolist()
        if calls.awaits[number]
    ]
    if not len(calls) or len(waits) * _TASKS_A_WAIT > graph.size:
        return None
    stretches = _stretches(graph, waits)
    run = _Replay(graph, steps)
    ends = []
    for step in range(steps):
        for stretch in stretches:
            if not run.advance(stretch, step):
                return None
        run.now += graph.end_ns
        ends.append(max(run.now, max(run.free, default=0.0)))
    return ends


class _Lane(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of one stream in a stretch, by their numbers in the step."""

    stream: int
    tasks: Indices
    call: Indices  # of each, counted from the stretch's first
    ready: Floats  # from its call to its end on a free stream, minus `busy`
    busy: Floats  # sum over the stream's tasks up to it
    dur: Floats
    waiting: Indices  # those that wait for a task of another stream
    other: Indices  # the tasks they wait for
    beyond: Floats  # from the other's start to this one's end, minus `busy`


class _HostStretch(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that do not wait for the device, and perhaps one at their end that does."""

    first_task: int
    end_task: int
    spent: Floats  # by the host, from the stretch's beginning to each call
    last_ns: float  # inside the last call
    behind: Indices  # per launch: the task that must have started, or one before all tasks
    lanes: list[_Lane]
    again: bool  # whether a pass may change what an earlier one found
    awaits: tuple[int, ...]
    tail_ns: float


def _stretches(graph: StepGraph, waits: list[int]) -> list[_HostStretch]:
    calls, tasks = graph.calls, graph.tasks
    first_task = np.searchsorted(tasks.call, np.arange(len(calls) + 1))
    launching = calls.kind == CallKind.LAUNCH
    behind = np.where(launching, first_task[:-1] - graph.queue_depth, -(1 << 60))
    bounds = [0, *(number + 1 for number in waits), len(calls)]
    stretches = []
    for first, last in pairwise(bounds):
        if first == last:
            continue
        low, high = int(first_task[first]), int(first_task[last])
        spent = np.cumsum(calls.gap_ns[first:last])
        spent[1:] += np.cumsum(calls.call_ns[first : last - 1])
        waited = last - 1 in waits
        own = behind[first:last]
        stretches.append(
            _HostStretch(
                first_task=low,
                end_task=high,
                spent=spent,
                last_ns=float(calls.call_ns[last - 1]),
                behind=own,
                lanes=_lanes(graph, low, high, first),
                again=bool((own >= low).any() or (tasks.after[low:high] >= low).any()),
                awaits=calls.awaits[last - 1] if waited else (),
                tail_ns=float(calls.tail_ns[last - 1]),
            )
        )
    return stretches


def _lanes(graph: StepGraph, low: int, high: int, first_call: int) -> list[_Lane]:
    tasks = graph.tasks
    lanes = []
    streams = tasks.stream[low:high]
    for stream in distinct(streams).tolist() if graph.streams > 1 else streams[:1].tolist():
        own = low + np.flatnonzero(streams == stream)
        dur = tasks.dur_ns[own]
        busy = np.cumsum(tasks.spacing_ns[own] + dur)
        waiting = np.flatnonzero(tasks.after[own] >= 0)
        other = tasks.after[own[waiting]].astype(np.intp)
        delay = tasks.dur_ns[other] + tasks.after_ns[own[waiting]]
        lanes.append(
            _Lane(
                stream=stream,
                tasks=own,
                call=(tasks.call[own] - first_call).astype(np.intp),
                ready=tasks.latency_ns[own] + dur - busy,
                busy=busy,
                dur=dur,
                waiting=waiting,
                other=other,
                beyond=delay + dur[waiting] - busy[waiting],
            )
        )
    return lanes


class _Replay:
    """How far the host and the streams have got."""

    def __init__(self, graph: StepGraph, steps: int) -> None:
        self.now = 0.0
        self.free = [0.0] * graph.streams
        self.count = len(graph.tasks)
        self.starts = np.zeros(steps * self.count)

    def advance(self, stretch: _HostStretch, step: int) -> bool:
        """Replay one stretch; False if it takes too many passes."""
        base = step * self.count
        starts = self.starts[base : base + self.count]
        low, high = stretch.first_task, stretch.end_task
        behind = stretch.behind + base
        limited = behind >= 0
        held = bool(limited.any())
        for _ in range(_MOST_PASSES):
            before = starts[low:high].copy() if stretch.again else None
            called = self.now + stretch.spent
            if held:
                full = np.where(
                    limited, self.starts[np.maximum(behind, 0)] - stretch.spent, -np.inf
                )
                called = np.maximum(called, np.maximum.accumulate(full) + stretch.spent)
            free = [(lane.stream, self._run(lane, called, starts)) for lane in stretch.lanes]
            if before is None or np.array_equal(before, starts[low:high]):
                break
        else:
            return False
        for stream, end in free:
            self.free[stream] = end
        self.now = float(called[-1] + stretch.last_ns)
        if stretch.awaits:
            done = max(self.free[stream] for stream in stretch.awaits)
            self.now = max(self.now, done + stretch.tail_ns)
        return True

    def _run(self, lane: _Lane, called: Floats, starts: Floats) -> float:
        ends = called[lane.call] + lane.ready
        if len(lane.waiting):
            later = starts[lane.other] + lane.beyond
            ends[lane.waiting] = np.maximum(ends[lane.waiting], later)
        ends = np.maximum(np.maximum.accumulate(ends), self.free[lane.stream]) + lane.busy
        starts[lane.tasks] = ends - lane.dur
        return float(ends[-1])
