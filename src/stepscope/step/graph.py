"""The step as a graph: the host's calls, the device's tasks, what waits for what; and how it
is built from a trace. Replaying it unchanged gives the trace's times back.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from stepscope.errors import NotCapturedError
from stepscope.records.explanation import Steps
from stepscope.records.normal import median, medians
from stepscope.records.trace import ABSENT, DeviceKind, HostKind, Trace
from stepscope.step.call_tree import distinct_places
from stepscope.step.collectives import find_callers
from stepscope.step.intervals import Set
from stepscope.step.phases import in_optimizer
from stepscope.step.statistics import quantile
from stepscope.step.timeline import blocking_calls
from stepscope.step.work import DATA_LOADING, Kind, Work, launches_of, rows_named
from stepscope.trace.links import distinct, nearest_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Flags = NDArray[np.bool_]
Rows = NDArray[np.intp] | NDArray[np.int32]

# A stretch of training as tasks: what the host calls, what the device runs, what waits for what.
#
# Columns, not objects: an edit is a new array, and a graph of a million tasks is a few arrays.
#
# Host calls are one lane in order of their start. The threads that feed a device take turns
# (backward runs on autograd's thread while the main one waits), so one lane holds them all; the
# time between two calls is the `gap` of the later one. Device tasks are in order of their calls; on
# a stream they run in that order.

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


# Builds the graph of a trace. Replaying it unchanged gives the trace's times back.

_THROTTLED_NS = 50_000  # a launch that took longer waited for a full queue
_MOST_CANDIDATES = 65  # earlier tasks that a waiting task may have waited for
_UNEXPLAINED_NS = 2_000
_LONGEST_LATENCY_NS = 20_000.0
_AWAITED_NS = 5_000  # a blocking call may return this much before the device's clock says so


def build_graph(trace: Trace, work: Work, *, described: bool = True) -> StepGraph:
    """The whole trace; with `described`, the calls carry their operators, which what-ifs need."""
    trace, work = _from_zero(trace, work)
    if work.on_host:
        return _host_graph(trace, work)
    launch = launches_of(trace, work)
    rows, kind = _call_rows(trace, work, launch)
    place = np.full(len(trace.host) + 1, ABSENT, np.int32)
    place[rows] = np.arange(len(rows), dtype=np.int32)
    call = _with_unlinked(work, place[launch])  # launch -1 reads the last place, which is absent
    order = np.lexsort((work.start_ns, call))
    call = call[order]
    begin = _origin(trace, work, rows)
    tasks = _tasks(trace, work, order, call, rows, begin)
    called = trace.host.start_ns[rows]
    spans = called, called + trace.host.dur_ns[rows]
    calls = _calls(trace, work, rows, kind, spans, begin)
    calls, depth = _unthrottled(calls, called, work.start_ns[order], call)
    calls = _awaiting(calls, spans, tasks.stream, work.end_ns[order], call)
    if not len(calls) and len(tasks):
        calls = _unrecorded_launch()
    graph = StepGraph(
        calls=calls,
        tasks=tasks,
        streams=int(tasks.stream.max(initial=-1)) + 1,
        end_ns=0.0,
        queue_depth=depth,
    )
    return describe(trace, work, graph) if described else graph


def _unrecorded_launch() -> Calls:
    """One call in place of all launches when the trace holds none of them."""
    none, absent = np.zeros(1), np.array([ABSENT], np.int32)
    kind, phase = np.array([CallKind.LAUNCH], np.int8), np.array([Phase.OTHER], np.int8)
    times = {"gap_ns": none, "call_ns": none, "tail_ns": none, "frames": none}
    return Calls(kind=kind, phase=phase, row=absent, operator=absent, awaits=((),), **times)


def describe(trace: Trace, work: Work, graph: StepGraph) -> StepGraph:
    """Add the operator of each call; on a CPU the calls already are the operators."""
    if work.on_host:
        return graph
    outermost = outermost_operator(trace, graph.calls.row)
    return replace(graph, calls=replace(graph.calls, operator=outermost))


def _from_zero(trace: Trace, work: Work) -> tuple[Trace, Work]:
    """Times from the first event: nanoseconds since 1970 are more than a float can hold."""
    first = [int(times.min()) for times in (trace.host.start_ns, work.start_ns) if len(times)]
    begin = min(first, default=0)
    host = replace(trace.host, start_ns=trace.host.start_ns - begin)
    work = replace(work, start_ns=work.start_ns - begin, end_ns=work.end_ns - begin)
    return replace(trace, host=host), work


# The host's lane


def _call_rows(
    trace: Trace, work: Work, launch: NDArray[np.int32]
) -> tuple[NDArray[np.intp], NDArray[np.int8]]:
    """Runtime calls that launch or wait, in order of their start."""
    host = trace.host
    kinds = np.zeros(len(host), np.int8)
    waiting = blocking_calls(trace)
    kinds[waiting[work.feeds(host.thread[waiting])]] = CallKind.WAIT
    kinds[launch[launch >= 0]] = CallKind.LAUNCH
    rows = np.flatnonzero(kinds)
    rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
    return rows, kinds[rows]


def _origin(trace: Trace, work: Work, rows: NDArray[np.intp]) -> int:
    first = [int(work.start_ns.min())] if len(work) else []
    if len(rows):
        first.append(int(trace.host.start_ns[rows[0]]))
    return min(first, default=0)


def _calls(
    trace: Trace, work: Work, rows: Rows, kind: NDArray[np.int8], spans: Set, begin: int
) -> Calls:
    """The host's lane: calls in order of their start, with their spans on the trace's clock."""
    start, end = ((times - begin).astype(np.float64) for times in spans)
    end = np.maximum.accumulate(end)
    before = np.append(0.0, end[:-1])
    host = trace.host
    frame = (host.kind == HostKind.PYTHON) & work.feeds(host.thread)
    begun = np.sort(host.start_ns[frame])
    return Calls(
        kind=kind,
        gap_ns=np.maximum(start - before, 0.0),
        call_ns=np.maximum(end - np.maximum(start, before), 0.0),
        tail_ns=np.zeros(len(rows)),
        phase=call_phases(trace, rows),
        row=rows.astype(np.int32),
        operator=np.full(len(rows), ABSENT, np.int32),
        frames=(
            np.searchsorted(begun, start + begin) - np.searchsorted(begun, before + begin)
        ).astype(np.float64),
        awaits=((),) * len(rows),
    )


def _unthrottled(
    calls: Calls, called_ns: NDArray[np.int64], started_ns: NDArray[np.int64], call: Ints
) -> tuple[Calls, int]:
    """Launches without their wait for a full queue, and the queue's depth. `started_ns` and `call`
    are the tasks' starts and launches."""
    launching, own = np.flatnonzero(calls.kind == CallKind.LAUNCH), calls.call_ns
    if not len(launching):
        return calls, QUEUE_DEPTH
    usual = median(own[launching])
    slow = launching[own[launching] > max(_THROTTLED_NS, 5 * usual)]
    launched = np.searchsorted(call, slow)
    ahead = launched - np.searchsorted(np.sort(started_ns), called_ns[slow])
    full = ahead > QUEUE_DEPTH // 4
    if not full.any():
        return calls, QUEUE_DEPTH
    own = own.copy()
    own[slow[full]] = usual
    return replace(calls, call_ns=own), int(median(ahead[full]))


def outermost_operator(trace: Trace, rows: Rows) -> NDArray[np.int32]:
    """The operator around each host row that no other operator encloses, or -1."""
    host = trace.host
    operator = host.kind == HostKind.OPERATOR
    operators = nearest_of(host, operator, rows)
    inner = np.flatnonzero(operators >= 0)
    while len(inner):
        outer = nearest_of(host, operator, host.parent[operators[inner]])
        inner, outer = inner[outer >= 0], outer[outer >= 0]
        operators[inner] = outer
    return operators


def call_phases(trace: Trace, rows: Rows) -> NDArray[np.int8]:
    """The part of a step that each host row belongs to."""
    host = trace.host
    named = host.kind <= HostKind.ANNOTATION
    phase = np.full(len(rows), Phase.FORWARD, np.int8)
    backward = (host.forward_thread > 0) | rows_named(
        trace, host, named, lambda name: name.startswith("autograd::engine")
    )
    phase[nearest_of(host, backward, rows) >= 0] = Phase.BACKWARD
    phase[in_optimizer(trace, rows)] = Phase.OPTIMIZER
    loading = rows_named(trace, host, named, DATA_LOADING.search)
    phase[nearest_of(host, loading, rows) >= 0] = Phase.DATA
    return phase


def _awaiting(
    calls: Calls, spans: Set, stream_of: Ints, ends: NDArray[np.int64], call: Ints
) -> Calls:
    """A blocking call waits for the streams whose last task had ended when it returned."""
    waiting = np.flatnonzero(calls.kind == CallKind.WAIT)
    if not len(waiting):
        return calls
    start, returned = (times[waiting] for times in spans)
    last = np.zeros(len(waiting), np.int64)
    awaited = np.zeros((int(stream_of.max(initial=-1)) + 1, len(waiting)), np.bool_)
    for stream, over in enumerate(awaited):
        tasks = np.flatnonzero(stream_of == stream)
        place = np.searchsorted(call[tasks], waiting) - 1
        end = ends[tasks[place]]
        over[:] = (place >= 0) & (end <= returned + _AWAITED_NS)
        last = np.where(over, np.maximum(last, end), last)
    awaits, own, tail = list(calls.awaits), calls.call_ns.copy(), calls.tail_ns.copy()
    for number, over in zip(waiting.tolist(), awaited.T, strict=True):
        awaits[number] = tuple(np.flatnonzero(over).tolist())
    late = last > start
    tail[waiting[late]] = np.maximum(returned - last, 0)[late]
    own[waiting[late]] = np.minimum(own, tail)[waiting[late]]
    return replace(calls, call_ns=own, tail_ns=tail, awaits=tuple(awaits))


# The device


def _with_unlinked(work: Work, call: NDArray[np.int32]) -> NDArray[np.int32]:
    """Assign a task without a recorded launch to the previous task's call on the device's clock."""
    lost = np.flatnonzero(call < 0)
    if not len(lost):
        return call
    linked = np.flatnonzero(call >= 0)
    order = linked[np.argsort(work.start_ns[linked], kind="stable")]
    place = np.searchsorted(work.start_ns[order], work.start_ns[lost], side="right") - 1
    call = call.copy()
    call[lost] = call[order[np.maximum(place, 0)]] if len(order) else 0
    return call


def _tasks(
    trace: Trace,
    work: Work,
    chosen: NDArray[np.intp],
    call: NDArray[np.int32],
    rows: NDArray[np.intp],
    begin: int,
) -> Tasks:
    device = trace.device
    start = work.start_ns[chosen].astype(np.float64) - begin
    end = work.end_ns[chosen].astype(np.float64) - begin
    on_device, on_stream = (
        column[work.rows[chosen]].astype(np.int64) for column in (device.device, device.stream)
    )
    stream = distinct_places(on_device << 32 | on_stream & 0xFFFFFFFF)[1].astype(np.int32)
    called = np.zeros(len(call))
    if len(rows):
        called = trace.host.start_ns[rows[call]].astype(np.float64) - begin
    # End of the previous task on its stream; long ago for the first.
    before = np.full(len(end), -1e15)
    for number in range(int(stream.max(initial=-1)) + 1):
        tasks = np.flatnonzero(stream == number)
        before[tasks[1:]] = end[tasks[:-1]]
    spacing, latency = start - before, start - called
    free = before <= called
    # A free stream may wait for another: only the shortest latencies are the launch's own.
    usual_latency = min(_low(latency[free & (latency > 0)], 0.05, 5_000.0), _LONGEST_LATENCY_NS)
    usual_spacing = _low(spacing[~free & (spacing >= 0)], 0.25, 1_000.0)
    unexplained = np.minimum(spacing, latency - usual_latency)
    after = _awaited_tasks(trace, work, chosen, stream, start, end, unexplained)
    elsewhere = after >= 0
    return Tasks(
        call=call,
        stream=stream,
        dur_ns=end - start,
        spacing_ns=np.where(free | elsewhere, np.minimum(spacing, usual_spacing), spacing),
        latency_ns=np.where(free & ~elsewhere, latency, np.minimum(latency, usual_latency)),
        kind=work.kind[chosen],
        row=work.rows[chosen].astype(np.int32),
        after=after,
        after_ns=np.where(elsewhere, np.maximum(start - end[after], 0.0), 0.0),
    )


def _low(values: Floats, share: float, default: float) -> float:
    return quantile(values, share) if len(values) else default


def _awaited_tasks(
    trace: Trace,
    work: Work,
    chosen: NDArray[np.intp],
    stream: Ints,
    start: Floats,
    end: Floats,
    unexplained: Floats,
) -> Ints:
    """A task that neither its stream nor its launch held back waited for another stream.

    Communication also waits for the compute launched before it, as its stream's events say.
    """
    after = np.full(len(start), ABSENT, np.int32)
    if int(stream.max(initial=0)) == 0:
        return after
    order = np.argsort(end, kind="stable")
    task = np.flatnonzero(unexplained > _UNEXPLAINED_NS)
    place = np.searchsorted(end[order], start[task], side="right")
    for _ in range(_MOST_CANDIDATES):
        place -= 1
        task, place = task[place >= 0], place[place >= 0]
        other = order[place]
        near = start[task] - end[other] < unexplained[task]
        waited = near & (stream[other] != stream[task]) & (other < task)
        after[task[waited]] = other[waited]
        task, place = task[near & ~waited], place[near & ~waited]
    comm = (work.kind[chosen] == Kind.COMM) & (after < 0)
    compute = np.flatnonzero(
        (work.kind[chosen] == Kind.COMPUTE)
        & (trace.device.kind[work.rows[chosen]] == DeviceKind.KERNEL)
    )
    task = np.flatnonzero(comm)
    place = np.searchsorted(compute, task) - 1
    task, other = task[place >= 0], compute[place[place >= 0]]
    over = end[other] <= start[task]
    after[task[over]] = other[over]
    return after


# The CPU as the device


def _host_graph(trace: Trace, work: Work) -> StepGraph:
    """Operators are the host's calls; the work of communication threads are tasks."""
    order = np.argsort(work.start_ns, kind="stable")
    feeds = work.feeds(trace.host.thread[work.rows[order]])
    own, other_threads = order[feeds], order[~feeds]
    spans = work.start_ns[own], work.end_ns[own]
    kind = np.full(len(own), CallKind.PLAIN, np.int8)
    calls = _calls(trace, work, work.rows[own], kind, spans, work.extent[0])
    calls = replace(calls, operator=calls.row)
    started = spans[0].astype(np.float64)
    calls, tasks, streams = communicate(trace, work, calls, started, other_threads)
    return StepGraph(calls=calls, tasks=tasks, streams=streams, end_ns=0.0, on_host=True)


# Communication in a CPU's trace: tasks next to the host's lane, and where the host waits for them.
#
# gloo's spans lie on threads of their own. The c10d:: call with as many elements starts a span. The
# host waits for a span that ends in a gap of its lane, and for one that covers a long gap: then the
# result is there, the host continues, and only later does gloo's thread end its span.

_SHORTEST_WAIT_NS = 20_000
_LONG_GAP_NS = 200_000
_SPANNED = 0.8  # of the gap


def communicate(
    trace: Trace, work: Work, calls: Calls, start_ns: Floats, others: NDArray[np.intp]
) -> tuple[Calls, Tasks, int]:
    """The host's calls with their waits, the tasks, and the number of streams.

    `start_ns` are the calls' starts on the trace's clock, `others` is the work of other threads.
    """
    if not len(calls):
        others = others[:0]
    call = _launching(trace, work, calls, start_ns, others)
    order = np.lexsort((work.start_ns[others], call))
    others, call = others[order], call[order]
    lanes = distinct_places(trace.host.thread[work.rows[others]])[1]
    begun = work.start_ns[others].astype(np.float64)
    end = work.end_ns[others].astype(np.float64)
    count = len(others)
    tasks = Tasks(
        call=call,
        stream=lanes.astype(np.int32).reshape(-1),
        dur_ns=end - begun,
        spacing_ns=np.zeros(count),
        latency_ns=begun - start_ns[call] if count else np.zeros(0),
        kind=work.kind[others],
        row=work.rows[others].astype(np.int32),
        after=np.full(count, ABSENT, np.int32),
        after_ns=np.zeros(count),
    )
    kind = calls.kind.copy()
    kind[call] = CallKind.LAUNCH
    calls = replace(calls, kind=kind)
    streams = int(tasks.stream.max(initial=-1)) + 1
    # The tasks' ends; one that the host waited for ends no later than the host continues.
    # Where another task ends as the host continues, the host waited for that one.
    ended = end.copy()
    for number in np.flatnonzero(calls.gap_ns > _LONG_GAP_NS).tolist():
        gap, resumed = calls.gap_ns[number], start_ns[number]
        earlier = tasks.call < number
        if (earlier & (end <= resumed) & (end >= resumed - (1 - _SPANNED) * gap)).any():
            continue
        running = earlier & (ended > resumed)
        running &= begun <= resumed - _SPANNED * gap
        ended[running] = resumed
    end = ended
    tasks = replace(tasks, dur_ns=end - begun)
    return *_with_waits(calls, tasks, start_ns, end), streams


def _launching(
    trace: Trace, work: Work, calls: Calls, start_ns: Floats, others: NDArray[np.intp]
) -> Ints:
    """The call that started each task: its c10d:: call, else the last call before it."""
    call = np.searchsorted(start_ns, work.start_ns[others], side="right").astype(np.int32) - 1
    spans = trace.host.kind[work.rows[others]] == HostKind.ANNOTATION
    place = np.full(len(trace.host) + 1, ABSENT, np.int32)
    place[calls.row] = np.arange(len(calls), dtype=np.int32)
    caller = np.full(len(others), ABSENT, np.int32)
    caller[spans] = find_callers(trace, work.rows[others[spans]])
    known = place[caller]  # caller -1 reads the last place, which is absent
    return np.maximum(np.where(known >= 0, known, call), 0).astype(np.int32)


def _with_waits(
    calls: Calls, tasks: Tasks, start_ns: Floats, end_ns: Floats
) -> tuple[Calls, Tasks]:
    """Insert a WAIT before every call in whose gap a task ended; the rest of the gap follows it."""
    if not len(tasks):
        return calls, tasks
    before = start_ns - calls.gap_ns
    order = np.argsort(end_ns, kind="stable")
    last = np.searchsorted(end_ns[order], start_ns, side="right") - 1
    task = order[np.maximum(last, 0)]
    ended = end_ns[task]
    waited = np.where((last >= 0) & (tasks.call[task] < np.arange(len(calls))), ended - before, 0.0)
    waits = np.flatnonzero(waited > _SHORTEST_WAIT_NS)
    if not len(waits):
        return calls, tasks
    gaps = calls.gap_ns.copy()
    gaps[waits] -= waited[waits]
    source = np.sort(np.concatenate((np.arange(len(calls)), waits)), kind="stable")
    new = np.zeros(len(source), np.bool_)
    new[waits + np.arange(len(waits))] = True  # before the call it delays
    columns = {
        name: getattr(calls, name)[source]
        for name in calls.__struct_fields__
        if name not in ("awaits", "gap_ns")
    }
    columns["gap_ns"] = gaps[source]
    for name in ("gap_ns", "call_ns", "tail_ns", "frames"):
        columns[name][new] = 0.0
    columns["kind"][new] = CallKind.WAIT
    awaits: list[tuple[int, ...]] = [()] * len(source)
    for place, number in zip(np.flatnonzero(new).tolist(), waits.tolist(), strict=True):
        launched = (tasks.call < number) & (end_ns <= start_ns[number])
        awaits[place] = tuple(distinct(tasks.stream[launched]).tolist())
    places = np.flatnonzero(~new).astype(np.int32)
    return Calls(**columns, awaits=tuple(awaits)), replace(tasks, call=places[tasks.call])


# One step that represents all steps of a trace: the median of each call and task.
#
# Steps of one training make the same calls in the same order, so each call and task has a time in
# every step, and the median drops what happened in one step only. If the steps differ, the one of
# median length represents all.

_Table = TypeVar("_Table", Calls, Tasks)
_CALL_TIMES = ("gap_ns", "call_ns", "tail_ns", "frames")
_TASK_TIMES = ("dur_ns", "spacing_ns", "latency_ns", "after_ns")


class Typical(msgspec.Struct, frozen=True, kw_only=True):
    graph: StepGraph
    steps: int  # that it represents
    alike: bool  # they made the same calls


def typical_step(trace: Trace, work: Work, steps: Steps, *, described: bool = True) -> Typical:
    """Raises NotCapturedError for a trace without work; `described` as in `build_graph`."""
    whole = build_graph(trace, work, described=False)
    if not whole.size:
        raise NotCapturedError(
            f"{trace.path}: there is no operator and no device event to replay; "
            "record with ProfilerActivity.CPU and CUDA"
        )
    typical = _one_of(trace, _pieces(trace, whole, steps))
    typical = typical or Typical(graph=whole, steps=1, alike=True)
    return replace(typical, graph=describe(trace, work, typical.graph)) if described else typical


def _pieces(trace: Trace, whole: StepGraph, steps: Steps) -> list[StepGraph]:
    """The graph of each step with calls; none if launches were not recorded."""
    if (whole.calls.row < 0).any():
        return []
    start = trace.host.start_ns[whole.calls.row]
    windows = [(step.start_ns, step.start_ns + step.dur_ns) for step in steps.steps]
    pieces = [_piece(trace, whole, start, window) for window in windows]
    return [piece for piece in pieces if len(piece.calls)]


def _one_of(trace: Trace, pieces: list[StepGraph]) -> Typical | None:
    if not pieces:
        return None
    # A step at the window's end may be cut off: leave out steps that did far less.
    most = max(piece.size for piece in pieces)
    pieces = [piece for piece in pieces if piece.size > most / 2]
    if all(_alike(trace, piece, pieces[-1]) for piece in pieces):
        return Typical(
            graph=replace(
                pieces[-1],
                calls=_medians([piece.calls for piece in pieces], _CALL_TIMES),
                tasks=_medians([piece.tasks for piece in pieces], _TASK_TIMES),
                end_ns=median([piece.end_ns for piece in pieces]),
            ),
            steps=len(pieces),
            alike=True,
        )
    order = sorted(pieces, key=lambda piece: piece.host_ns)
    return Typical(graph=order[(len(order) - 1) // 2], steps=len(pieces), alike=False)


def _piece(
    trace: Trace, whole: StepGraph, start: NDArray[np.int64], window: tuple[int, int]
) -> StepGraph:
    """The calls of one step with the tasks they launched."""
    first, last = np.searchsorted(start, window).tolist()
    calls = _some(whole.calls, slice(first, last))
    if not len(calls):
        return replace(whole, calls=calls, tasks=_some(whole.tasks, np.zeros(0, np.intp)))
    gaps = calls.gap_ns.copy()
    gaps[0] = min(gaps[0], float(start[first] - window[0]))
    ended = start[last - 1] + trace.host.dur_ns[calls.row[-1]]
    launched = np.flatnonzero((whole.tasks.call >= first) & (whole.tasks.call < last))
    if not whole.on_host:
        launched = launched[trace.device.launch[whole.tasks.row[launched]] >= 0]
    tasks = _some(whole.tasks, launched)
    place = np.full(len(whole.tasks) + 1, -1, np.int32)
    place[launched] = np.arange(len(launched), dtype=np.int32)
    return replace(
        whole,
        calls=replace(calls, gap_ns=gaps),
        tasks=replace(tasks, call=tasks.call - np.int32(first), after=place[tasks.after]),
        end_ns=float(max(0, window[1] - ended)),
    )


def _some(table: _Table, chosen: NDArray[np.intp] | slice[int, int]) -> _Table:
    columns = {name: getattr(table, name)[chosen] for name in table.__struct_fields__}
    return type(table)(**columns)


def _alike(trace: Trace, one: StepGraph, other: StepGraph) -> bool:
    if len(one.calls) != len(other.calls) or len(one.tasks) != len(other.tasks):
        return False
    host = trace.host.name
    same = np.array_equal(host[one.calls.row], host[other.calls.row])
    return same and np.array_equal(one.tasks.call, other.tasks.call)


def _medians(tables: list[_Table], names: tuple[str, ...]) -> _Table:
    """The last table with the median of these columns."""
    columns = {name: medians([getattr(table, name) for table in tables]) for name in names}
    return replace(tables[-1], **columns)
