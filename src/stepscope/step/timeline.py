"""Divide a stretch of time so that it adds up to the nanosecond: compute, exposed
communication and memory, idle by its cause; and one steady cycle into a budget.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.records.explanation import (
    GAP_CAUSES,
    Budget,
    Gaps,
    Idle,
    Part,
    RankExplanation,
    Steps,
    StepTime,
    Timeline,
)
from stepscope.records.normal import median
from stepscope.records.trace import ABSENT, HostKind, Trace
from stepscope.step import intervals
from stepscope.step.arrays import Bools, Indices, Int32s, Int64s
from stepscope.step.intervals import Set
from stepscope.step.work import DATA_LOADING, Work, launches_of, rows_named, spans_of

# The timeline that adds up: span = compute + exposed_comm + exposed_memory + idle, to the ns.


def divide(work: Work, window: tuple[int, int] | None = None) -> Timeline:
    """Divide the span of all work, or a given window of it."""
    low, high = window or work.extent
    sets = [intervals.clip(of, low, high) for of in (work.compute, work.comm, work.memory)]
    _, lengths, (compute, comm, memory) = intervals.sweep(sets)
    computing = int(lengths[compute].sum())
    exposed_comm = int(lengths[comm & ~compute].sum())
    exposed_memory = int(lengths[memory & ~comm & ~compute].sum())
    return Timeline(
        start_ns=low,
        span_ns=high - low,
        compute_ns=computing,
        exposed_comm_ns=exposed_comm,
        exposed_memory_ns=exposed_memory,
        idle_ns=high - low - computing - exposed_comm - exposed_memory,
        comm_ns=intervals.length(sets[1]),
        memory_ns=intervals.length(sets[2]),
        hidden_comm_ns=int(lengths[comm & compute].sum()),
    )


# Why the device had nothing to do: every gap, by what the host was doing meanwhile.

LAUNCH_LATENCY_NS = 30_000
BLOCKING_CALL = re.compile(
    r"^(?:cuda|cu|hip|ze|ur)\w*Synchronize|^(?:cuda|hip)Memcpy(?!.*Async)|^cuMemcpy(?!.*Async)"
    r"|^hipMemcpyWithStream|^urQueueFinish|^urEventWait$"
)
# CUPTI also records overhead of the driver, which exists without a profiler too: compiling,
# loading modules, full launch queues.
PROFILER_WORK = re.compile(r"^(?!.*(?:Compiler|Loading|Command Buffer Full|UVM))")
_LAUNCH, _OTHER, _DATA, _SYNC, _OPERATORS, _PYTHON, _PROFILER = range(len(GAP_CAUSES))


def blocking_calls(trace: Trace) -> Indices:
    """Host rows of runtime calls that wait for the device."""
    calls = trace.host.kind == HostKind.RUNTIME
    return np.flatnonzero(rows_named(trace, trace.host, calls, BLOCKING_CALL.search))


class HostTime(msgspec.Struct, frozen=True, kw_only=True):
    """What the threads that feed the device were doing."""

    blocking: Indices  # host rows that wait for the device
    layers: tuple[tuple[int, Set], ...]  # by cause; an earlier cause goes before a later one


def watch_host(trace: Trace, work: Work) -> HostTime:
    """What the host did during the whole trace, for use with any window of it."""
    host = trace.host
    blocking = blocking_calls(trace)
    mine = work.feeds(host.thread)
    named = mine & (host.kind <= HostKind.ANNOTATION)
    framework = (host.kind == HostKind.OPERATOR) | (host.kind == HostKind.RUNTIME)
    overhead = host.kind == HostKind.OVERHEAD
    layers = (
        (_PROFILER, rows_named(trace, host, overhead, PROFILER_WORK.search)),
        (_DATA, rows_named(trace, host, named, DATA_LOADING.search)),
        (_SYNC, blocking[mine[blocking]]),
        (_OPERATORS, mine & framework),
    )
    spans = tuple((cause, spans_of(host, rows)) for cause, rows in layers)
    return HostTime(blocking=blocking, layers=spans)


def split_idle(
    trace: Trace, work: Work, host: HostTime, window: tuple[int, int] | None = None
) -> tuple[Idle, Gaps]:
    """Split the idle time of the whole trace, or of a window, exactly; and list the gaps."""
    starts, ends, owner = _gaps(work, window)
    fed = _queued_late(trace, work, starts, owner)
    short = ends - starts < LAUNCH_LATENCY_NS
    cause = np.where(fed, _PYTHON, np.where(short, _LAUNCH, _OTHER))
    table = _host_causes(host, starts, ends, fed)
    cause = np.where(fed, table.argmax(axis=0), cause).astype(np.int8)
    stops = np.sort(trace.host.start_ns[host.blocking] + trace.host.dur_ns[host.blocking])
    opened = fed & (np.searchsorted(stops, starts) < np.searchsorted(stops, ends, side="right"))
    sizes = ends - starts
    idle = Idle(
        host_ns=int(sizes[fed].sum()),
        launch_ns=int(sizes[cause == _LAUNCH].sum()),
        other_ns=int(sizes[cause == _OTHER].sum()),
        data_loading_ns=int(table[_DATA].sum()),
        sync_ns=int(table[_SYNC].sum()),
        operators_ns=int(table[_OPERATORS].sum()),
        python_ns=int(table[_PYTHON].sum()),
        profiler_ns=int(table[_PROFILER].sum()),
        after_sync_ns=int(sizes[opened].sum()),
        after_sync_gaps=int(opened.sum()),
    )
    frames = frames_at(trace, work, (starts + ends) // 2)
    return idle, Gaps(start_ns=starts, end_ns=ends, cause=cause, frame=frames)


def _gaps(work: Work, window: tuple[int, int] | None) -> tuple[Int64s, Int64s, Int64s]:
    """Times without work and, for each, the work that ended it (-1 at the window's end)."""
    low, high = window or work.extent
    inside = intervals.clip(work.busy, low, high)
    starts, ends = np.append(low, inside[1]), np.append(inside[0], high)
    keep = starts < ends
    starts, ends = starts[keep], ends[keep]
    order = np.append(np.argsort(work.start_ns, kind="stable"), ABSENT)
    owner = order[np.searchsorted(work.start_ns[order[:-1]], ends)]
    return starts, ends, owner


def _queued_late(trace: Trace, work: Work, starts: Int64s, owner: Int64s) -> Bools:
    """Gaps in which nothing was queued: the next launch call began after the device ran dry."""
    if work.on_host:
        return np.ones(len(starts), np.bool_)
    launch = launches_of(trace, work)[owner]
    called = trace.host.start_ns[np.maximum(launch, 0)] if len(trace.host) else starts
    return (owner >= 0) & (launch >= 0) & (called > starts)


def _host_causes(host: HostTime, starts: Int64s, ends: Int64s, fed: Bools) -> Int64s:
    """(cause, gap) -> ns, for host gaps only; each column adds up to the gap."""
    table = np.zeros((len(GAP_CAUSES), len(starts)), np.int64)
    rows = np.flatnonzero(fed)
    if not len(rows):
        return table
    gap_set = starts[rows], ends[rows]
    at, lengths, cover = intervals.sweep((gap_set, *(spans for _, spans in host.layers)))
    inside = cover[0]
    cause = np.full(len(at), _PYTHON, np.int8)
    for (code, _), covered in reversed(list(zip(host.layers, cover[1:], strict=True))):
        cause[covered] = code
    gap = rows[np.searchsorted(gap_set[0], at[inside], side="right") - 1]
    np.add.at(table, (cause[inside], gap), lengths[inside])
    return table


def frames_at(trace: Trace, work: Work, times: Int64s) -> Int32s:
    """The innermost Python function that ran at each time on the busiest feeding thread."""
    host = trace.host
    python = np.flatnonzero((host.kind == HostKind.PYTHON) & work.feeds(host.thread))
    out = np.full(len(times), ABSENT, np.int32)
    if not len(python):
        return out
    thread = np.bincount(host.thread[python]).argmax()
    low, high = np.searchsorted(host.thread, (thread, thread + 1))
    row = (np.searchsorted(host.start_ns[low:high], times, side="right") - 1 + low).astype(np.int32)
    row[row < low] = ABSENT
    asked = np.flatnonzero(row >= 0)
    while len(asked):
        at = row[asked]
        fits = (host.kind[at] == HostKind.PYTHON) & (
            host.start_ns[at] + host.dur_ns[at] > times[asked]
        )
        out[asked[fits]] = at[fits]
        row[asked[~fits]] = host.parent[at[~fits]]
        asked = asked[~fits]
        asked = asked[row[asked] >= 0]
    return out


# The step, divided: the shares of one steady cycle, in milliseconds of the step of record.


def step_time(steps: Steps, timeline: Timeline) -> float | None:
    """The profiled step in ms: the median cycle, else the median step, else the whole window."""
    if steps.cycles_ns:
        return median(steps.cycles_ns) / 1e6
    if len(steps.steps) == 1 and timeline.span_ns:
        return max(steps.steps[0].dur_ns, timeline.span_ns) / 1e6
    if steps.steps:
        return median([step.dur_ns for step in steps.steps]) / 1e6
    return timeline.span_ns / 1e6 if timeline.span_ns else None


def make_budget(steps: Steps, step: StepTime, timeline: Timeline, idle: Idle) -> Budget:
    """`timeline` and `idle` cover the same window as the cycles."""
    slices = {
        "compute": timeline.compute_ns,
        "exposed_comm": timeline.exposed_comm_ns,
        "exposed_memory": timeline.exposed_memory_ns,
        "data_loading": idle.data_loading_ns,
        "sync": idle.sync_ns,
        "operators": idle.operators_ns,
        "python": idle.python_ns,
        "profiler": idle.profiler_ns,
        "idle_launch": idle.launch_ns,
        "idle_other": idle.other_ns,
    }
    span, ms = timeline.span_ns or 1, step.profiled or 0.0
    parts = [Part(id=name, ms=ms * ns / span, share=ns / span) for name, ns in slices.items()]
    return Budget(step_ms=ms, parts=tuple(parts), basis="cycles" if steps.cycles_ns else "window")


def mean_budget(ranks: tuple[RankExplanation, ...]) -> Budget:
    """The mean shares of all ranks that recorded something, over the slowest rank's step."""
    # Whether there was any work: steps without it have a length but no shares.
    budgets = [
        rank.budget
        for rank in ranks
        if (bool(rank.budget.step_ms) and any(part.share for part in rank.budget.parts))
    ] or [ranks[0].budget]
    if len(budgets) == 1:
        return budgets[0]
    ms = max(budget.step_ms for budget in budgets)
    shares: dict[str, float] = {}  # not every rank has the same stalls
    for part in (part for budget in budgets for part in budget.parts):
        shares[part.id] = shares.get(part.id, 0.0) + part.share / len(budgets)
    bases = {budget.basis for budget in budgets}
    return Budget(
        step_ms=ms,
        parts=tuple(Part(id=name, ms=ms * share, share=share) for name, share in shares.items()),
        basis=bases.pop() if len(bases) == 1 else "window",
    )


def stretched(budget: Budget, step_ms: float) -> Budget:
    """The same shares of a step with another length."""
    parts = tuple(replace(part, ms=part.share * step_ms) for part in budget.parts)
    return replace(budget, step_ms=step_ms, parts=parts)
