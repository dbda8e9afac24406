"""Device time by kernel name. On the CPU, an operator's own time takes a kernel's place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.call_tree import children_sum, enclosing, group, sum_by
from stepscope.explain.steps import step_of
from stepscope.explain.work import KIND_NAMES, Kind, comm_spans, launches_of
from stepscope.records.explanation import Kernel
from stepscope.records.trace import HostKind
from stepscope.trace.links import nearest

if TYPE_CHECKING:
    from stepscope.explain.arrays import Bools, Int8s, Int32s, Int64s
    from stepscope.explain.work import Work
    from stepscope.records.explanation import Steps
    from stepscope.records.trace import Trace


def list_kernels(trace: Trace, work: Work, steps: Steps) -> tuple[Kernel, ...]:
    """Longest total first."""
    if work.on_host:
        return _by_name(trace, *_own_operator_time(trace))
    name, dur = trace.device.name[work.rows], trace.device.dur_ns[work.rows]
    return _by_name(trace, name, work.kind, dur, _of_steps(trace, work, steps))


def _of_steps(trace: Trace, work: Work, steps: Steps) -> Bools | None:
    """Without work of earlier steps, which began before these and has no recorded launch."""
    launch = launches_of(trace, work)
    linked = launch >= 0
    if not steps.steps or not linked.any():
        return None
    mine = np.zeros(len(launch), np.bool_)
    mine[linked] = step_of(steps.steps, trace.host.start_ns[launch[linked]]) >= 0
    if not mine.any():
        return None
    mine[~linked] = work.start_ns[~linked] >= work.start_ns[mine].min()
    return mine


def _by_name(
    trace: Trace, name: Int32s, kind: Int8s, dur: Int64s, of_steps: Bools | None = None
) -> tuple[Kernel, ...]:
    if not len(name):
        return ()
    first, inverse, count = group(name, kind)
    total = sum_by(inverse, dur, count)
    shortest, longest = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
    np.minimum.at(shortest, inverse, dur)
    np.maximum.at(longest, inverse, dur)
    calls = np.bincount(inverse, minlength=count)
    known = of_steps is not None
    inside = np.bincount(inverse[of_steps], minlength=count) if known else calls
    inside_ns = sum_by(inverse[of_steps], dur[of_steps], count) if known else total
    return tuple(
        Kernel(
            name=trace.strings[name[first[i]]],
            kind=KIND_NAMES[kind[first[i]]],  # type: ignore[arg-type]
            count=int(calls[i]),
            total_ns=int(total[i]),
            min_ns=int(shortest[i]),
            max_ns=int(longest[i]),
            steps_count=int(inside[i]) if known else None,
            steps_ns=int(inside_ns[i]) if known else None,
        )
        for i in np.argsort(-total, kind="stable").tolist()
    )


def _own_operator_time(trace: Trace) -> tuple[Int32s, Int8s, Int64s]:
    """Operators and communication spans, each without those directly inside it."""
    host = trace.host
    comm = comm_spans(trace)
    rows = np.flatnonzero((host.kind == HostKind.OPERATOR) | comm)
    own = host.dur_ns[rows] - children_sum(enclosing(host, rows), host.dur_ns[rows])
    own = np.maximum(own, 0)  # in damaged files rows inside one may overlap each other
    inside_comm = nearest(host, comm)[rows] >= 0
    kind = np.where(inside_comm, Kind.COMM, Kind.COMPUTE).astype(np.int8)
    return host.name[rows], kind, own
