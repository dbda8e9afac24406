"""One rank's collectives with what tells why they were made: where they were called, when ready."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.job import KINDS, CollectiveCalls, Group, RankFolder, RankSteps
from stepscope.records.memory import CapturedMemory
from stepscope.records.trace import ABSENT, HostEvents, HostKind, Trace
from stepscope.step import intervals
from stepscope.step.collectives import exposed_time
from stepscope.step.intervals import Set
from stepscope.step.work import Kind, Work, rows_named
from stepscope.trace.links import nearest_of

Bools = NDArray[np.bool_]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_CODE = {name: code for code, name in enumerate(KINDS)}
_SAME_COLUMNS = ("kind", "group", "size_bytes", "step", "start_ns", "end_ns")
_IN_BACKWARD = re.compile(r"^autograd::engine::evaluate_function|^FSDP::.*backward|_backward_hook")


class StrategyEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of one rank's calls, in the order they were made."""

    trace: Trace
    work: Work
    pace: RankSteps
    layout: dict[str, Any]
    captured: CapturedMemory | None
    groups: tuple[Group, ...]
    kind: NDArray[np.int8]
    group: Int32
    size_bytes: Int64
    step: Int32  # index into pace, ABSENT outside
    row: Int32  # the host event that made it, or ABSENT
    made_ns: Int64
    ready_ns: Int64  # what it sends was there
    start_ns: Int64
    end_ns: Int64
    exposed_ns: Int64
    around_ns: Int64  # exposed communication outside all calls: launching, and waking up
    backward: Bools

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def step_ns(self) -> int:
        return mean(self.pace.dur_ns)

    @property
    def steps(self) -> int:
        return max(1, len(self.pace))

    def spans(self, chosen: Bools) -> Set:
        return intervals.union(self.start_ns[chosen], self.end_ns[chosen])

    def times_per_step(self, calls: NDArray[np.intp]) -> dict[str, int]:
        """What these calls take, and what of it no compute hides."""
        columns = {"time_ns": self.end_ns - self.start_ns, "exposed_ns": self.exposed_ns}
        return {name: round(int(ns[calls].sum()) / self.steps) for name, ns in columns.items()}

    def of_kind(self, *names: str) -> Bools:
        return np.isin(self.kind, [_CODE[name] for name in names])

    def of_groups(self, names: set[str]) -> Bools:
        chosen = [place for place, group in enumerate(self.groups) if group.name in names]
        return np.isin(self.group, chosen)

    def inside(self, matches: Callable[[str], object]) -> Int32:
        """Per call the nearest host event around it (or itself) with such a name, or ABSENT."""
        host = self.trace.host
        named = rows_named(self.trace, host, host.kind <= HostKind.ANNOTATION, matches)
        return nearest_of(host, named, self.row)

    def groups_of(self, chosen: Bools) -> tuple[Group, ...]:
        """The groups that these calls used, most used first."""
        counts = np.bincount(self.group[chosen], minlength=len(self.groups))
        return tuple(self.groups[i] for i in np.argsort(-counts, kind="stable") if counts[i])

    def comm_ns(self, chosen: Bools) -> int:
        """Time of these calls a step, counted once, with what surrounds them."""
        union = self.spans(chosen)
        if len(self.pace):
            union = intervals.clip(union, *window_of(self.pace))
        return round((intervals.length(union) + int(self.around_ns[chosen].sum())) / self.steps)

    def exposed_comm_ns(self, chosen: Bools) -> int:
        """The part of it that no compute hides. Strategies add up to the step's."""
        bare = int(self.exposed_ns[chosen].sum()) + int(self.around_ns[chosen].sum())
        return round(bare / self.steps)


def gather_evidence(
    trace: Trace,
    work: Work,
    calls: CollectiveCalls,
    row: Int32,
    pace: RankSteps,
    folder: RankFolder | None,
    captured: CapturedMemory | None,
) -> StrategyEvidence:
    """Join the calls to what made them."""
    known = row >= 0
    called = calls.start_ns
    if len(trace.host):
        called = np.where(known, trace.host.start_ns[np.maximum(row, 0)], called)
    order = np.argsort(called, kind="stable")
    ready = called if work.on_host else _ready_on_device(trace, work, calls, called, known)
    begun = called if work.on_host else calls.start_ns
    return StrategyEvidence(
        trace=trace,
        work=work,
        pace=pace,
        layout=folder.layout if folder else {},
        captured=captured,
        groups=calls.groups,
        **{name: getattr(calls, name)[order] for name in _SAME_COLUMNS},
        row=row[order],
        made_ns=called[order],
        ready_ns=ready[order],
        exposed_ns=_exposed_in_steps(work, calls, pace)[order],
        around_ns=_around(work, calls, pace, begun)[order],
        backward=nearest_of(trace.host, _of_backward(trace), row[order]) >= 0,
    )


def _exposed_in_steps(work: Work, calls: CollectiveCalls, pace: RankSteps) -> Int64:
    """What no compute hides of each call, without what runs on after the last step."""
    if not len(pace):
        return calls.exposed_ns
    low, high = window_of(pace)
    return exposed_time(work, np.clip(calls.start_ns, low, high), np.clip(calls.end_ns, low, high))


def window_of(pace: RankSteps) -> tuple[int, int]:
    """From the first step's start to the last one's end."""
    return int(pace.start_ns[0]), int(pace.start_ns[-1] + pace.dur_ns[-1])


def _around(work: Work, calls: CollectiveCalls, pace: RankSteps, begun: Int64) -> Int64:
    """Exposed communication of the steps that is inside no call, such as gloo's queue and the wait
    operators after it: it belongs to the call of the steps that was begun last."""
    out = np.zeros(len(calls), np.int64)
    mine = np.flatnonzero(calls.step >= 0)
    if not len(mine) or not len(pace):
        return out
    spans = intervals.union(calls.start_ns[mine], calls.end_ns[mine])
    bare = intervals.subtract(intervals.subtract(work.comm, work.compute), spans)
    starts, ends = intervals.clip(bare, *window_of(pace))
    mine = mine[np.argsort(begun[mine], kind="stable")]
    place = np.searchsorted(begun[mine], starts, side="right") - 1
    np.add.at(out, mine[np.maximum(place, 0)], ends - starts)
    return out


def _ready_on_device(
    trace: Trace, work: Work, calls: CollectiveCalls, called: Int64, known: Bools
) -> Int64:
    """When the compute launched before it is done."""
    done = _last_end(*_launched_compute(trace, work), called)
    return np.where(known, np.minimum(np.maximum(called, done), calls.start_ns), calls.start_ns)


def _of_backward(trace: Trace) -> Bools:
    host = trace.host
    named = rows_named(trace, host, host.kind <= HostKind.ANNOTATION, _IN_BACKWARD.search)
    return named | (host.forward_thread > 0)


def names_at(host: HostEvents, rows: Int32) -> Int32:
    """String codes of the names of these host rows; ABSENT stays ABSENT."""
    names = np.full(len(rows), ABSENT, np.int32)
    names[rows >= 0] = host.name[rows[rows >= 0]]
    return names


def mean(values: Any) -> int:
    """Rounded; 0 of nothing."""
    return round(float(np.mean(values))) if len(values) else 0


def common_size(sizes: Int64) -> int | None:
    """The size that all calls share; None if they differ or it is unknown."""
    return int(sizes[0]) if sizes[0] >= 0 and (sizes == sizes[0]).all() else None


def backward_spans(evidence: StrategyEvidence) -> tuple[Set, Set]:
    """Compute of backward and all other compute, each as (starts, ends) by start."""
    trace, work, host = evidence.trace, evidence.work, evidence.trace.host
    engine = _of_backward(trace)
    if work.on_host:
        start, end = host.start_ns, host.start_ns + host.dur_ns
        chosen = engine & (host.kind == HostKind.OPERATOR)
        mine = intervals.intersect(intervals.union(start[chosen], end[chosen]), work.compute)
        return mine, intervals.subtract(work.compute, mine)
    rows = np.flatnonzero(work.kind == Kind.COMPUTE)
    launch = trace.device.launch[work.rows[rows]]
    inside = nearest_of(host, engine, launch) >= 0
    return (
        intervals.union(work.start_ns[rows[inside]], work.end_ns[rows[inside]]),
        intervals.union(work.start_ns[rows[~inside]], work.end_ns[rows[~inside]]),
    )


def compute_before(evidence: StrategyEvidence, times: Int64) -> Int64:
    """When the compute that was launched before these host times had all ended; 0 for none."""
    trace, work = evidence.trace, evidence.work
    compute = work.compute if work.on_host else _launched_compute(trace, work)
    return _last_end(*compute, times)


def _launched_compute(trace: Trace, work: Work) -> tuple[Int64, Int64]:
    """When the host launched each compute kernel, and when that kernel ended."""
    rows = np.flatnonzero(work.kind == Kind.COMPUTE)
    launch = trace.device.launch[work.rows[rows]]
    return trace.host.start_ns[launch[launch >= 0]], work.end_ns[rows[launch >= 0]]


def _last_end(launched: Int64, ends: Int64, times: Int64) -> Int64:
    if not len(launched):
        return np.zeros(len(times), np.int64)
    order = np.argsort(launched, kind="stable")
    reach = np.maximum.accumulate(ends[order])
    place = np.searchsorted(launched[order], times) - 1
    return np.where(place >= 0, reach[np.maximum(place, 0)], 0)
