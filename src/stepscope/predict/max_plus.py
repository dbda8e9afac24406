"""A step's graph with all but a few of its moments folded away, exactly.

Host and streams only ever wait for the latest of several times and then spend some of their own. So
between two moments what they do is a table: how long behind each of the earlier times each of the
later ones comes, at least. A few tables and what is put between them (the exchange of gradients,
whose length is not known yet) give the step that replaying the whole graph would give. Only a full
launch queue, which no step's length hangs on, is left out.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.graph import CallKind
from stepscope.explain.work import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stepscope.explain.replay.graph import Floats, StepGraph

HOST = 0  # the first of the times; then the streams, then ends of tasks that others wait for
_NEVER = -np.inf
_MOST_KEPT = 8  # ends of tasks at one moment; of any more their stream's time stands in
_MANY_TASKS = 8  # of one call: it is taken apart


class StepTables(msgspec.Struct, frozen=True, kw_only=True):
    """Tables of (later time, earlier time), one for each stretch between two moments."""

    tables: NDArray[np.float64]  # stretches x times x times
    marked: tuple[tuple[int, ...], ...]  # of each marked task: the times that are its end
    host_ns: float  # what the host needs when it never waits
    busy_ns: tuple[float, ...]  # of each stream, without marked tasks
    # What a worker that is slower by 1 adds: by table where streams wait for one another, else the
    # share of what comes behind each time.
    own: tuple[float, ...]
    slope: NDArray[np.float64] | None = None


def slow_tables(shape: StepTables, pace: float) -> Floats:
    """Its tables for a worker that takes so many times as long for its own work."""
    if shape.slope is None or pace == 1.0:
        found: Floats = shape.tables * (1 + (pace - 1) * np.array(shape.own))
        return found
    return np.asarray(shape.tables + (pace - 1) * shape.slope)


def add_slope(shape: StepTables, other: StepTables, pace: float) -> StepTables:
    """`other` is the same step of a worker so many times as slow."""
    known = np.isfinite(shape.tables) & np.isfinite(other.tables)
    apart = np.subtract(other.tables, shape.tables, out=np.zeros_like(shape.tables), where=known)
    return replace(shape, slope=apart / (pace - 1))


def tabulate_step(
    graph: StepGraph, cuts: Sequence[int] = (), marked: Sequence[int] = ()
) -> StepTables:
    """Moments come right before some calls (in order; one may repeat, or be the length), and where
    marked tasks start: how long those last is not known yet."""
    whole = _taken_apart(graph, marked) if marked else graph
    lanes = _Lanes(whole, marked)
    found = lanes.run(list(cuts))
    times = found.shape[1]
    return StepTables(
        tables=found,
        marked=tuple(lanes.marked),
        host_ns=graph.host_ns,
        busy_ns=_busy(graph, marked),
        own=_own(graph, marked, times),
    )


def advance_times(table: Floats, before: Floats) -> Floats:
    """One stretch further."""
    found: Floats = (table + before).max(axis=1)
    return found


def split_launch(graph: StepGraph, bounds: Sequence[int]) -> StepGraph:
    """A graph of one call as one of several, the next beginning at each of these tasks."""
    count = len(bounds) + 1
    number = np.arange(count)
    columns = {
        name: getattr(graph.calls, name)[np.zeros(count, np.intp)]
        for name in graph.calls.__struct_fields__
        if name != "awaits"
    }
    columns["gap_ns"] = np.where(number == 0, graph.calls.gap_ns[0], 0.0)
    columns["call_ns"] = np.where(number == count - 1, graph.calls.call_ns[0], 0.0)
    part = np.searchsorted(np.array(bounds), np.arange(len(graph.tasks)), side="right")
    return replace(
        graph,
        calls=type(graph.calls)(**columns, awaits=((),) * count),
        tasks=replace(graph.tasks, call=part.astype(np.int32)),
    )


def _taken_apart(graph: StepGraph, marked: Sequence[int]) -> StepGraph:
    if len(graph.calls) != 1 or len(graph.tasks) <= _MANY_TASKS:
        return graph
    special = _special(graph, marked).tolist()
    bounds = sorted({edge for task in special for edge in (task, task + 1)})
    return split_launch(graph, [edge for edge in bounds if 0 < edge < len(graph.tasks)])


def _special(graph: StepGraph, marked: Sequence[int]) -> NDArray[np.intp]:
    """Tasks that wait for one another, and marked ones."""
    after = graph.tasks.after
    waiting = np.flatnonzero(after >= 0)
    return np.unique(np.concatenate((waiting, after[waiting], np.array(marked, np.intp))))


def _busy(graph: StepGraph, marked: Sequence[int]) -> tuple[float, ...]:
    tasks = graph.tasks
    spent = tasks.dur_ns.copy()
    spent[list(marked)] = 0.0
    found = np.bincount(tasks.stream, spent + tasks.spacing_ns, graph.streams)
    return tuple(found.tolist())


def _own(graph: StepGraph, marked: Sequence[int], times: int) -> tuple[float, ...]:
    """A slower worker's host and kernels are slower; gaps between kernels are not."""
    tasks = graph.tasks
    mine = np.where(tasks.kind != Kind.COMM, tasks.dur_ns, 0.0)
    working = np.bincount(tasks.stream, mine, graph.streams)
    busy = np.array(_busy(graph, marked))
    shares = np.divide(working, busy, out=np.ones(graph.streams), where=busy > 0)
    mean = float(working.sum() / busy.sum()) if busy.sum() else 1.0
    launched = 1.0 if (graph.calls.gap_ns > 0).sum() > 1 else mean  # a CUDA graph
    found = [launched, *shares.tolist()]
    return (*found, *[mean] * (times - len(found)))


def _stretches(graph: StepGraph, bounds: NDArray[np.int64]) -> Floats:
    """A table for each, as if nobody waited: running sums and maxima."""
    calls, tasks = graph.calls, graph.tasks
    count = len(bounds) - 1
    done = np.append(0.0, np.cumsum(calls.gap_ns + calls.call_ns))
    begun = done[bounds[:-1]]
    found = np.full((count, 1 + graph.streams, 1 + graph.streams), _NEVER)
    found[:, HOST, HOST] = done[bounds[1:]] - begun
    called = done[:-1] + calls.gap_ns
    for stream in range(graph.streams):
        at = 1 + stream
        mine = np.flatnonzero(tasks.stream == stream)
        busy = np.append(0.0, np.cumsum(tasks.spacing_ns[mine] + tasks.dur_ns[mine]))
        edges = np.searchsorted(tasks.call[mine], bounds)
        some = np.flatnonzero(np.diff(edges))
        found[:, at, at] = busy[edges[1:]] - busy[edges[:-1]]
        if not len(some):
            continue
        free = called[tasks.call[mine]] + tasks.latency_ns[mine] + tasks.dur_ns[mine] - busy[1:]
        latest = np.maximum.reduceat(free, edges[some])
        found[some, at, HOST] = latest - begun[some] + busy[edges[some + 1]]
    return found


class _Lanes:
    """Where host and streams are, counted from each of the times at the last moment."""

    def __init__(self, graph: StepGraph, marked: Sequence[int]) -> None:
        self.graph = graph
        self.streams = graph.streams
        self.size = 1 + graph.streams + _MOST_KEPT
        self.special = _special(graph, marked)
        self.unknown = set(marked)
        after = graph.tasks.after
        waiting = np.flatnonzero(after >= 0)
        # The last task that waits for each.
        self.needed = dict(zip(after[waiting].tolist(), waiting.tolist(), strict=True))
        self.kept: dict[int, int] = {}  # task: the place of its end among the times
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
            return self._nobody_waits(cuts)
        edges = {0, len(calls), *cuts, *(at + 1 for at in waits)}
        bounds = sorted(edges | single | {at + 1 for at in single})
        tables = _stretches(graph, np.array(bounds))
        first_task = np.searchsorted(graph.tasks.call, np.array(bounds)).tolist()
        for number, (first, last) in enumerate(pairwise(bounds)):
            for _ in range(cuts.count(first)):
                self._cut(first_task[number])
            if first in single:
                self._call(first, first_task[number], first_task[number + 1])
            else:
                self._through(tables[number])
            if last - 1 in waits:
                self._wait(last - 1)
        for _ in range(cuts.count(len(calls))):
            self._cut(len(graph.tasks))
        self.now[HOST] += graph.end_ns
        self._cut(len(graph.tasks))
        return _trimmed(np.array(self.tables), 1 + self.streams)

    def _nobody_waits(self, cuts: list[int]) -> Floats:
        """Every stretch is a running sum."""
        graph = self.graph
        found = _stretches(graph, np.array([0, *cuts, len(graph.calls)]))
        found[-1, HOST, HOST] += graph.end_ns
        return found

    def _begin(self) -> None:
        self.now: Floats = np.where(np.eye(self.size, dtype=bool), 0.0, _NEVER)
        self.ends = {task: self.now[place].copy() for task, place in self.kept.items()}

    def _through(self, table: Floats) -> None:
        known = 1 + self.streams
        before = self.now[:known]
        self.now[:known] = (table[:, :, None] + before[None, :, :]).max(axis=1)

    def _wait(self, call: int) -> None:
        calls = self.graph.calls
        for stream in calls.awaits[call]:
            behind = self.now[1 + stream] + calls.tail_ns[call]
            self.now[HOST] = np.maximum(self.now[HOST], behind)

    def _call(self, call: int, first: int, last: int) -> None:
        """Task by task."""
        graph, tasks = self.graph, self.graph.tasks
        self.now[HOST] += graph.calls.gap_ns[call]
        for task in range(first, last):
            stream = int(tasks.stream[task])
            end = self._begins(task, stream)
            if task not in self.unknown:
                end = end + tasks.dur_ns[task]
            self.now[1 + stream] = end
            if task in self.needed:
                self.ends[task] = end
            if task in self.unknown:
                self._cut(task + 1)
                kept = self.kept.get(task)
                self.marked.append((1 + stream,) if kept is None else (1 + stream, kept))
        self.now[HOST] += graph.calls.call_ns[call]

    def _begins(self, task: int, stream: int) -> Floats:
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
        """A moment; tasks from this one on are still to come."""
        live = {other: end for other, end in self.ends.items() if self.needed[other] >= task}
        self.kept = {other: place for other, place in self.kept.items() if other in live}
        taken = set(self.kept.values())
        spare = [place for place in range(1 + self.streams, self.size) if place not in taken]
        fresh = [other for other in live if other not in self.kept]
        self.kept |= dict(zip(fresh, spare, strict=False))
        table = np.full((self.size, self.size), _NEVER)
        table[: 1 + self.streams] = self.now[: 1 + self.streams]
        for other, place in self.kept.items():
            table[place] = live[other]
        self.tables.append(table)
        self._begin()


def _trimmed(tables: Floats, fewest: int) -> Floats:
    """Without times that nobody kept."""
    used = np.flatnonzero(np.isfinite(tables).any(axis=(0, 2)))
    most = max(fewest, int(used.max(initial=0)) + 1)
    return tables[:, :most, :most]
