"""Device time by kernel name. On the CPU, an operator's own time takes a kernel's place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.tree import children_sum, enclosing, group, sum_by
from stepscope.explain.work import KIND_NAMES, Kind, comm_spans
from stepscope.records.explanation import Kernel
from stepscope.records.trace import HostKind
from stepscope.trace.links import nearest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.work import Work
    from stepscope.records.trace import Trace


def list_kernels(trace: Trace, work: Work) -> tuple[Kernel, ...]:
    """Longest total first."""
    if work.on_host:
        name, kind, dur = _own_operator_time(trace)
    else:
        name, kind = trace.device.name[work.rows], work.kind
        dur = trace.device.dur_ns[work.rows]
    return _by_name(trace, name, kind, dur)


def _by_name(
    trace: Trace, name: NDArray[np.int32], kind: NDArray[np.int8], dur: NDArray[np.int64]
) -> tuple[Kernel, ...]:
    if not len(name):
        return ()
    first, inverse, count = group(name, kind)
    total = sum_by(inverse, dur, count)
    shortest, longest = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
    np.minimum.at(shortest, inverse, dur)
    np.maximum.at(longest, inverse, dur)
    calls = np.bincount(inverse, minlength=count)
    return tuple(
        Kernel(
            name=trace.strings[name[first[i]]],
            kind=KIND_NAMES[kind[first[i]]],  # type: ignore[arg-type]
            count=int(calls[i]),
            total_ns=int(total[i]),
            min_ns=int(shortest[i]),
            max_ns=int(longest[i]),
        )
        for i in np.argsort(-total, kind="stable").tolist()
    )


def _own_operator_time(
    trace: Trace,
) -> tuple[NDArray[np.int32], NDArray[np.int8], NDArray[np.int64]]:
    """Operators and communication spans, each less those directly inside it."""
    host = trace.host
    comm = comm_spans(trace)
    rows = np.flatnonzero((host.kind == HostKind.OPERATOR) | comm)
    own = host.dur_ns[rows] - children_sum(enclosing(host, rows), host.dur_ns[rows])
    own = np.maximum(own, 0)  # in damaged files rows inside one may overlap each other
    inside_comm = nearest(host, comm)[rows] >= 0
    kind = np.where(inside_comm, Kind.COMM, Kind.COMPUTE).astype(np.int8)
    return host.name[rows], kind, own
