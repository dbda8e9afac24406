"""A step's graph contracted, exactly, to tables between a few moments (max-plus algebra).

Host and streams only ever wait for the latest of several times and then spend some of their own. So
what happens between two moments is a table: how long after each earlier time each later one comes,
at the least. A few tables, with the exchange of gradients put between them, give the same step as
replaying the whole graph; how long the exchange takes can be set later. Only a full launch queue is
left out; no step's length depends on it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.graph import CallKind
from stepscope.explain.work import Kind
from stepscope.predict.edit import take_calls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stepscope.explain.replay.graph import Floats, StepGraph

HOST = 0  # the index of the host's time; then come the streams, then ends of awaited tasks
_NEVER = -np.inf
_MAX_ENDS = 8  # of tasks at one moment; beyond that a stream's time stands in for its tasks
_MANY_TASKS = 8  # a call with more is split


class StepTables(msgspec.Struct, frozen=True, kw_only=True):
    """Tables of (later time, earlier time), one per stretch between two moments."""

    tables: Floats  # stretches x times x times
    marked: tuple[tuple[int, ...], ...]  # the times that are each marked task's end
    host_ns: float  # what the host needs if it never waits
    busy_ns: tuple[float, ...]  # of each stream, without marked tasks
    # What a worker slower by 1 adds: a share of the table, by time; if streams wait for each other,
    # a table of its own.
    own: tuple[float, ...]
    slope: Floats | None = None


def add_slope(step: StepTables, slower: StepTables, pace: float) -> StepTables:
    """`slower` is the same step of a worker that takes `pace` times as long."""
    known = np.isfinite(step.tables) & np.isfinite(slower.tables)
    added = np.subtract(slower.tables, step.tables, out=np.zeros_like(step.tables), where=known)
    return replace(step, slope=added / (pace - 1))


def tabulate_step(
    graph: StepGraph, cuts: Sequence[int] = (), marked: Sequence[int] = ()
) -> StepTables:
    """Contract a step to the moments right before `cuts` and where `marked` tasks start.

    Cuts are calls in order; one may repeat, and the number of calls means the end. How long marked
    tasks take is set later.
    """
    builder = _TableBuilder(_split_large_call(graph, marked) if marked else graph, marked)
    tables = builder.run(list(cuts))
    return StepTables(
        tables=tables,
        marked=tuple(builder.marked),
        host_ns=graph.host_ns,
        busy_ns=_busy_ns(graph, marked),
        own=_own_shares(graph, marked, tables.shape[1]),
    )


def split_launch(graph: StepGraph, bounds: Sequence[int]) -> StepGraph:
    """Split a graph's one call into several, a new one at each of these tasks."""
    count = len(bounds) + 1
    number = np.arange(count)
    calls = replace(
        take_calls(graph.calls, np.zeros(count, np.intp)),
        gap_ns=np.where(number == 0, graph.calls.gap_ns[0], 0.0),
        call_ns=np.where(number == count - 1, graph.calls.call_ns[0], 0.0),
        awaits=((),) * count,
    )
    part = np.searchsorted(np.array(bounds), np.arange(len(graph.tasks)), side="right")
    return replace(graph, calls=calls, tasks=replace(graph.tasks, call=part.astype(np.int32)))


def _split_large_call(graph: StepGraph, marked: Sequence[int]) -> StepGraph:
    if len(graph.calls) != 1 or len(graph.tasks) <= _MANY_TASKS:
        return graph
    special = _find_special(graph, marked).tolist()
    bounds = sorted({edge for task in special for edge in (task, task + 1)})
    return split_launch(graph, [edge for edge in bounds if 0 < edge < len(graph.tasks)])


def _find_special(graph: StepGraph, marked: Sequence[int]) -> NDArray[np.intp]:
    """Tasks that wait for each other, and marked ones."""
    after = graph.tasks.after
    waiting = np.flatnonzero(after >= 0)
    return np.unique(np.concatenate((waiting, after[waiting], np.array(marked, np.intp))))


def _busy_ns(graph: StepGraph, marked: Sequence[int]) -> tuple[float, ...]:
    """By stream, without marked tasks."""
    tasks = graph.tasks
    spent = tasks.dur_ns.copy()
    spent[list(marked)] = 0.0
    return tuple(np.bincount(tasks.stream, spent + tasks.spacing_ns, graph.streams).tolist())


def _own_shares(graph: StepGraph, marked: Sequence[int], times: int) -> tuple[float, ...]:
    """The share of each time that slows with the worker: host and kernels, not the gaps between."""
    tasks = graph.tasks
    own_ns = np.where(tasks.kind != Kind.COMM, tasks.dur_ns, 0.0)
    working = np.bincount(tasks.stream, own_ns, graph.streams)
    busy = np.array(_busy_ns(graph, marked))
    by_stream = np.divide(working, busy, out=np.ones(graph.streams), where=busy > 0)
    mean = float(working.sum() / busy.sum()) if busy.sum() else 1.0
    host = 1.0 if (graph.calls.gap_ns > 0).sum() > 1 else mean  # mean: a CUDA graph
    shares = [host, *by_stream.tolist()]
    return (*shares, *[mean] * (times - len(shares)))


def _tabulate_stretches(graph: StepGraph, bounds: NDArray[np.int64]) -> Floats:
    """A table per stretch as if nothing in it waited: running sums and maxima."""
    calls, tasks = graph.calls, graph.tasks
    count = len(bounds) - 1
    done = np.append(0.0, np.cumsum(calls.gap_ns + calls.call_ns))
    begun = done[bounds[:-1]]
    tables = np.full((count, 1 + graph.streams, 1 + graph.streams), _NEVER)
    tables[:, HOST, HOST] = done[bounds[1:]] - begun
    called = done[:-1] + calls.gap_ns
    for stream in range(graph.streams):
        time = 1 + stream
        mine = np.flatnonzero(tasks.stream == stream)
        busy = np.append(0.0, np.cumsum(tasks.spacing_ns[mine] + tasks.dur_ns[mine]))
        edges = np.searchsorted(tasks.call[mine], bounds)
        used = np.flatnonzero(np.diff(edges))
        tables[:, time, time] = busy[edges[1:]] - busy[edges[:-1]]
        if not len(used):
            continue
        free = called[tasks.call[mine]] + tasks.latency_ns[mine] + tasks.dur_ns[mine] - busy[1:]
        latest = np.maximum.reduceat(free, edges[used])
        tables[used, time, HOST] = latest - begun[used] + busy[edges[used + 1]]
    return tables


class _TableBuilder:
    """Where host and streams are, counted from each of the times at the last moment."""

    def __init__(self, graph: StepGraph, marked: Sequence[int]) -> None:
        self.graph = graph
        self.streams = graph.streams
        self.size = 1 + graph.streams + _MAX_ENDS
        self.special = _find_special(graph, marked)
        self.unknown = set(marked)
        after = graph.tasks.after
        waiting = np.flatnonzero(after >= 0)
        # The last task that waits for each awaited one.
        self.last_waiter = dict(zip(after[waiting].tolist(), waiting.tolist(), strict=True))
        self.places: dict[int, int] = {}  # task: the index of its end among the times
        self.ends: dict[int, Floats] = {}
        self.tables: list[Floats] = []
        self.marked: list[tuple[int, ...]] = []
        self._begin()

    def run(self, cuts: list[int]) -> Floats:
        graph, calls = self.graph, self.graph.calls
        waits = {
            at for at in np.flatnonzero(calls.kind == CallKind.WAIT).tolist() if calls.awaits[at]
        }
        single = set(graph.tasks.call[self.special].tolist())
        if not waits and not single:
            return self._run_without_waits(cuts)
        edges = {0, len(calls), *cuts, *(at + 1 for at in waits)}
        bounds = sorted(edges | single | {at + 1 for at in single})
        tables = _tabulate_stretches(graph, np.array(bounds))
        first_task = np.searchsorted(graph.tasks.call, np.array(bounds)).tolist()
        for number, (first, last) in enumerate(pairwise(bounds)):
            for _ in range(cuts.count(first)):
                self._cut(first_task[number])
            if first in single:
                self._call(first, first_task[number], first_task[number + 1])
            else:
                self._advance(tables[number])
            if last - 1 in waits:
                self._wait(last - 1)
        for _ in range(cuts.count(len(calls))):
            self._cut(len(graph.tasks))
        self.now[HOST] += graph.end_ns
        self._cut(len(graph.tasks))
        return _trim(np.array(self.tables), 1 + self.streams)

    def _run_without_waits(self, cuts: list[int]) -> Floats:
        graph = self.graph
        tables = _tabulate_stretches(graph, np.array([0, *cuts, len(graph.calls)]))
        tables[-1, HOST, HOST] += graph.end_ns
        return tables

    def _begin(self) -> None:
        self.now: Floats = np.where(np.eye(self.size, dtype=bool), 0.0, _NEVER)
        self.ends = {task: self.now[place].copy() for task, place in self.places.items()}

    def _advance(self, table: Floats) -> None:
        lanes = 1 + self.streams
        before = self.now[:lanes]
        self.now[:lanes] = (table[:, :, None] + before[None, :, :]).max(axis=1)

    def _wait(self, call: int) -> None:
        calls = self.graph.calls
        for stream in calls.awaits[call]:
            returned = self.now[1 + stream] + calls.tail_ns[call]
            self.now[HOST] = np.maximum(self.now[HOST], returned)

    def _call(self, call: int, first: int, last: int) -> None:
        graph, tasks = self.graph, self.graph.tasks
        self.now[HOST] += graph.calls.gap_ns[call]
        for task in range(first, last):
            stream = int(tasks.stream[task])
            end = self._begin_task(task, stream)
            if task not in self.unknown:
                end = end + tasks.dur_ns[task]
            self.now[1 + stream] = end
            if task in self.last_waiter:
                self.ends[task] = end
            if task in self.unknown:
                self._cut(task + 1)
                place = self.places.get(task)
                self.marked.append((1 + stream,) if place is None else (1 + stream, place))
        self.now[HOST] += graph.calls.call_ns[call]

    def _begin_task(self, task: int, stream: int) -> Floats:
        tasks, other = self.graph.tasks, int(self.graph.tasks.after[task])
        begin: Floats = np.maximum(
            self.now[HOST] + tasks.latency_ns[task], self.now[1 + stream] + tasks.spacing_ns[task]
        )
        if other < 0:
            return begin
        ended = self.ends.get(other)
        if ended is None:
            ended = self.now[1 + int(tasks.stream[other])]
        later: Floats = np.maximum(begin, ended + tasks.after_ns[task])
        return later

    def _cut(self, task: int) -> None:
        """End a stretch; tasks from this one on are still to come."""
        live = {other: end for other, end in self.ends.items() if self.last_waiter[other] >= task}
        self.places = {other: place for other, place in self.places.items() if other in live}
        taken = set(self.places.values())
        spare = [place for place in range(1 + self.streams, self.size) if place not in taken]
        fresh = [other for other in live if other not in self.places]
        self.places |= dict(zip(fresh, spare, strict=False))
        table = np.full((self.size, self.size), _NEVER)
        table[: 1 + self.streams] = self.now[: 1 + self.streams]
        for other, place in self.places.items():
            table[place] = live[other]
        self.tables.append(table)
        self._begin()


def _trim(tables: Floats, fewest: int) -> Floats:
    """Drop times that no stretch uses."""
    used = np.flatnonzero(np.isfinite(tables).any(axis=(0, 2)))
    most = max(fewest, int(used.max(initial=0)) + 1)
    return tables[:, :most, :most]
