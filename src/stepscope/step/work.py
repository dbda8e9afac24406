"""The device's work, and its kind: compute, communication or memory.

On an accelerator, work is every kernel, copy and memset in the file. In a trace without any, the
CPU is the device, and the operators on the training's threads are its compute.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.trace import DeviceEvents, DeviceKind, HostEvents, HostKind, Trace
from stepscope.step import intervals
from stepscope.step.arrays import Bools, Indices, Int8s, Int32s, Int64s
from stepscope.step.intervals import Set
from stepscope.trace.links import distinct, nearest


class Kind(IntEnum):
    """The three kinds of work."""

    COMPUTE = 0
    COMM = 1
    MEMORY = 2


def one_of(words: str) -> Callable[[str], bool]:
    """Tests whether a name contains one of these lower-case words, in any case. Kernel names have
    thousands of letters, and a regular expression takes ten times as long."""
    wanted = words.split()

    def matches(name: str) -> bool:
        lower = name.lower()
        return any(word in lower for word in wanted)

    return matches


KIND_NAMES = ("compute", "comm", "memory")
_COMM_KERNEL = one_of("nccl rccl hccl oneccl cross_device_reduce")
COMM_SPAN = re.compile(r"^(?:gloo:|nccl:|mpi:|ucc:|c10d::|_c10d_functional::)|^record_param_comms$")
# These last from the call to the wait, on the caller's own thread: what runs inside is compute.
_SENDING = re.compile(r"^\w+:(?:send|recv)")
DATA_LOADING = re.compile(r"data[_ ]?load", re.IGNORECASE)
# These wait inside operators of backward, on the thread that computes.
_WAITING = re.compile(r"^FSDP::|^FullyShardedDataParallel\.")
_ROCM_COPY = re.compile(r"^__amd_rocclr_(?:copy|fill)")
_FEW_NAMES = 8  # comparing each is faster than looking names up


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The device's events as columns, and their unions by kind."""

    on_host: bool  # the CPU is the device
    rows: Indices  # into Trace.device, or Trace.host when on_host
    kind: Int8s
    start_ns: Int64s
    end_ns: Int64s
    compute: Set
    comm: Set
    memory: Set
    threads: Int32s  # host threads that feed the device (or are it)

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def extent(self) -> tuple[int, int]:
        """First start and last end."""
        if not len(self):
            return 0, 0
        return int(self.start_ns.min()), int(self.end_ns.max())

    def feeds(self, thread: Int32s) -> Bools:
        """Whether each of these threads feeds the device."""
        mine = np.zeros(max(int(of.max(initial=-1)) for of in (thread, self.threads)) + 1, np.bool_)
        mine[self.threads] = True
        return mine.take(thread)

    @property
    def busy(self) -> Set:
        """All kinds together."""
        return intervals.union_all((self.compute, self.comm, self.memory))


def find_work(trace: Trace) -> Work:
    """Device events where there are any, else the host's operators."""
    rows = np.flatnonzero(trace.device.kind <= DeviceKind.MEMSET)
    return _device_work(trace, rows) if len(rows) else _host_work(trace)


def rows_named(
    trace: Trace, events: HostEvents | DeviceEvents, among: Bools, matches: Callable[[str], object]
) -> Bools:
    """Those of the rows `among` whose name matches. Each distinct name is tested once."""
    return named(trace, events.name, among, matches)


def named(trace: Trace, names: Int32s, among: Bools, matches: Callable[[str], object]) -> Bools:
    """The same for any column of names."""
    wanted = np.zeros(len(trace.strings), np.bool_)
    wanted[names[among].astype(np.intp)] = True
    codes = np.flatnonzero(wanted).tolist()
    hits = [code for code in codes if matches(trace.strings[code])]
    if len(hits) <= _FEW_NAMES:
        rows = np.zeros(len(names), np.bool_)
        for code in hits:
            rows |= names == code
    else:
        wanted[:] = False
        wanted[hits] = True
        rows = wanted.take(names)
    return among & rows


def spans_of(events: HostEvents | DeviceEvents, rows: NDArray[Any]) -> Set:
    """The time that these rows cover."""
    start = events.start_ns[rows]
    return intervals.union(start, start + events.dur_ns[rows])


def _device_work(trace: Trace, rows: Indices) -> Work:
    device = trace.device
    kernel = device.kind == DeviceKind.KERNEL
    comm = rows_named(trace, device, kernel, _COMM_KERNEL)[rows]
    copy = rows_named(trace, device, kernel, _ROCM_COPY.match)[rows]
    kind = np.full(len(rows), Kind.MEMORY, dtype=np.int8)
    kind[kernel[rows] & ~copy] = Kind.COMPUTE
    kind[comm] = Kind.COMM
    start, launch = device.start_ns[rows], device.launch[rows]
    threads = distinct(trace.host.thread[launch[launch >= 0]])
    return Work(
        on_host=False,
        rows=rows,
        kind=kind,
        start_ns=start,
        end_ns=start + device.dur_ns[rows],
        compute=spans_of(device, rows[kind == Kind.COMPUTE]),
        comm=spans_of(device, rows[kind == Kind.COMM]),
        memory=spans_of(device, rows[kind == Kind.MEMORY]),
        threads=distinct(np.append(threads, stepping_threads(trace))),
    )


def _host_work(trace: Trace) -> Work:
    """Compute is each thread's top-level operators, without communication and without the data
    loader, which the step waits for too. Communication is that of all threads."""
    host = trace.host
    comm = comm_spans(trace)
    holding = comm & ~rows_named(trace, host, comm, _SENDING.match)
    loading = rows_named(trace, host, host.kind == HostKind.ANNOTATION, DATA_LOADING.search)
    operator = (host.kind == HostKind.OPERATOR) & (nearest(host, holding | loading) < 0)
    top = operator & ~below(trace, operator)
    rows = np.flatnonzero(top | comm)
    start = host.start_ns[rows]
    return Work(
        on_host=True,
        rows=rows,
        kind=np.where(comm[rows], Kind.COMM, Kind.COMPUTE).astype(np.int8),
        start_ns=start,
        end_ns=start + host.dur_ns[rows],
        compute=_computing(trace, operator, top, holding),
        comm=spans_of(host, comm),
        memory=intervals.EMPTY,
        threads=distinct(np.append(distinct(host.thread[operator]), stepping_threads(trace))),
    )


def _computing(trace: Trace, operator: Bools, top: Bools, holding: Bools) -> Set:
    """Operators of all threads, without communication and without waits inside operators."""
    host = trace.host
    wait = rows_named(trace, host, host.kind == HostKind.ANNOTATION, _WAITING.match)
    wait &= below(trace, operator)
    inner = np.zeros(len(host), np.bool_)  # operators right inside such a wait
    if wait.any():
        above = np.maximum(host.parent, 0)
        held = nearest(host, operator | wait)[above]
        inner = operator & (host.parent >= 0) & (held >= 0) & wait[np.maximum(held, 0)]
    computing = []
    for thread in distinct(host.thread[operator]).tolist():
        mine = host.thread == thread
        busy = spans_of(host, top & mine)
        if wait.any():
            busy = intervals.subtract(busy, spans_of(host, wait & mine))
            busy = intervals.union_all((busy, spans_of(host, inner & mine)))
        computing.append(intervals.subtract(busy, spans_of(host, holding & mine)))
    return intervals.union_all(computing)


def comm_spans(trace: Trace) -> Bools:
    """Host rows that are communication. What runs inside one is part of it, not compute."""
    host = trace.host
    return rows_named(trace, host, host.kind <= HostKind.ANNOTATION, COMM_SPAN.search)


def below(trace: Trace, wanted: Bools) -> Bools:
    """Rows that have one of the wanted rows above them."""
    parent = trace.host.parent
    return (parent >= 0) & (nearest(trace.host, wanted)[np.maximum(parent, 0)] >= 0)


def stepping_threads(trace: Trace) -> Int32s:
    """Threads that carry the profiler's step marks, or the busiest Python thread."""
    host = trace.host
    not_python = host.kind != HostKind.PYTHON
    marked = rows_named(trace, host, not_python, lambda name: name.startswith("ProfilerStep"))
    if marked.any():
        return distinct(host.thread[marked])
    python = host.thread[host.kind == HostKind.PYTHON]
    if len(python):
        return np.array([np.bincount(python).argmax()], dtype=np.int32)
    return np.empty(0, np.int32)


def launches_of(trace: Trace, work: Work) -> Int32s:
    """The host row of each piece of work: its launch, or the work itself on the CPU."""
    return work.rows.astype(np.int32) if work.on_host else trace.device.launch[work.rows]
