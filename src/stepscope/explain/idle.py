"""Why the device had nothing to do: every gap, by what the host was doing meanwhile."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain import intervals
from stepscope.explain.work import DATA_LOADING, launches_of, rows_named, spans_of
from stepscope.records.explanation import GAP_CAUSES, Gaps, Idle
from stepscope.records.trace import ABSENT, HostKind

if TYPE_CHECKING:
    from stepscope.explain.arrays import Bools, Indices, Int32s, Int64s
    from stepscope.explain.intervals import Set
    from stepscope.explain.work import Work
    from stepscope.records.trace import Trace

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
    opened = fed & _holds_end_of(host.blocking, trace, starts, ends)
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


def _holds_end_of(rows: Indices, trace: Trace, starts: Int64s, ends: Int64s) -> Bools:
    stops = np.sort(trace.host.start_ns[rows] + trace.host.dur_ns[rows])
    return np.searchsorted(stops, starts) < np.searchsorted(stops, ends, side="right")


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
