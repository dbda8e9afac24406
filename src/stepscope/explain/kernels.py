"""What ran on the device: kernels by name and by the operator that launched them, how they
were launched, copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.records.explanation import Copy, Kernel, Launches, Steps
from stepscope.records.trace import DeviceKind, HostKind, Trace
from stepscope.step import intervals
from stepscope.step.arrays import Bools, Indices, Int8s, Int32s, Int64s
from stepscope.step.call_tree import children_sum, enclosing, group, sum_by
from stepscope.step.statistics import quantile
from stepscope.step.steps import step_of
from stepscope.step.work import KIND_NAMES, Kind, Work, comm_spans, launches_of, named
from stepscope.trace.links import distinct, nearest, nearest_of

if TYPE_CHECKING:
    from stepscope.explain.flops.costs import Costs

# Device time by kernel name. On the CPU, an operator's own time takes a kernel's place.


def list_kernels(trace: Trace, work: Work, steps: Steps) -> tuple[Kernel, ...]:
    """Longest total first."""
    if work.on_host:
        # Operators and communication spans, each without those directly inside it.
        host = trace.host
        comm = comm_spans(trace)
        rows = np.flatnonzero((host.kind == HostKind.OPERATOR) | comm)
        own = host.dur_ns[rows] - children_sum(enclosing(host, rows), host.dur_ns[rows])
        own = np.maximum(own, 0)  # in damaged files rows inside one may overlap each other
        inside_comm = nearest(host, comm)[rows] >= 0
        kind = np.where(inside_comm, Kind.COMM, Kind.COMPUTE).astype(np.int8)
        return _by_name(trace, *(host.name[rows], kind, own))
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


# The device's work in a window, with the operator that launched each piece.


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels, copies and memsets that began in the window, in order of their start."""

    rows: Indices  # of Trace.device
    kind: Int8s
    dur_ns: Int64s
    # Host row of the innermost operator around the launch, or -1; of a CUDA graph's kernel, the
    # operator that it was joined to.
    operator: Int32s

    def __len__(self) -> int:
        return len(self.rows)


def launched_in(
    trace: Trace, work: Work, start_ns: int, end_ns: int, costs: Costs | None = None
) -> Launched:
    """Everything that began between these times; nothing where the CPU is the device."""
    device, host = trace.device, trace.host
    began = (work.start_ns >= start_ns) & (work.start_ns < end_ns)
    chosen = np.flatnonzero(began & (not work.on_host))
    rows = work.rows[chosen]
    operator = nearest_of(host, host.kind == HostKind.OPERATOR, device.launch[rows])
    if costs is not None and not work.on_host:
        operator = np.where(costs.replayed[rows], costs.operator[rows], operator)
    return Launched(
        rows=rows,
        kind=work.kind[chosen],
        dur_ns=device.dur_ns[rows],
        operator=operator,
    )


def by_operator(trace: Trace, launched: Launched, matches: Callable[[str], object]) -> Bools:
    """Pieces whose operator's name matches; each name is looked at once."""
    known = launched.operator >= 0
    if not known.any():
        return known
    return named(trace, trace.host.name[launched.operator], known, matches)


def by_kernel(trace: Trace, launched: Launched, matches: Callable[[str], object]) -> Bools:
    """Pieces whose own name matches; each name is looked at once."""
    every = np.ones(len(launched), np.bool_)
    return named(trace, trace.device.name[launched.rows], every, matches)


def callers(trace: Trace, launched: Launched) -> Int32s:
    """The host row to look for the user's code from: of work in backward, its forward operator."""
    host = trace.host
    launch = trace.device.launch[launched.rows]
    if not len(host):
        return launch
    backward = nearest_of(host, host.forward_of >= 0, launch)
    forward = host.forward_of[np.maximum(backward, 0)]
    return np.where(backward >= 0, forward, launch).astype(np.int32)


# How work reached the device: launch latency, queue depth, short kernels.

SHORT_KERNEL_NS = 10_000


def describe_launches(trace: Trace, work: Work) -> Launches:
    """Counts and distributions; what cannot be known without a device is None."""
    if work.on_host:
        return no_launches()
    device, host = trace.device, trace.host
    launch = launches_of(trace, work)
    linked = launch >= 0
    calls = distinct(launch[linked])
    dur = device.dur_ns[work.rows]
    kernel = device.kind[work.rows] == DeviceKind.KERNEL
    short = kernel & (dur < SHORT_KERNEL_NS)
    latency = _latencies(trace, work, launch)
    mean, most, empty = _queue(trace, work, launch)
    return Launches(
        device_events=len(work),
        linked=int(linked.sum()),
        unlinked=int((~linked).sum()),
        unlinked_ns=int(dur[~linked].sum()),
        calls=len(calls),
        call_ns=int(host.dur_ns[calls].sum()),
        latency_p50_ns=_quantile(latency, 0.5),
        latency_p90_ns=_quantile(latency, 0.9),
        queue_mean=mean,
        queue_max=most,
        queue_empty_share=empty,
        short_kernels=int(short.sum()),
        short_kernels_ns=int(dur[short].sum()),
        kernels=int(kernel.sum()),
        graph_kernels=int((kernel & (device.graph_node[work.rows] > 0)).sum()),
    )


def _latencies(trace: Trace, work: Work, launch: Int32s) -> Int64s:
    """Call start to device start, where the stream had nothing before it to wait for."""
    device = trace.device
    lane = device.device[work.rows].astype(np.int64) * 2**32 + device.stream[work.rows]
    order = np.lexsort((work.start_ns, lane))
    same = np.diff(lane[order], prepend=lane[order][:1] - 1) == 0
    previous_end = np.where(same, np.roll(work.end_ns[order], 1), np.iinfo(np.int64).min)
    rows = order[launch[order] >= 0]
    called = trace.host.start_ns[launch[rows]]
    free = previous_end[launch[order] >= 0] <= called
    return (work.start_ns[rows] - called)[free]


def _queue(
    trace: Trace, work: Work, launch: Int32s
) -> tuple[float | None, int | None, float | None]:
    """Launched but not yet started: time-weighted mean, maximum, share of time at zero."""
    rows = np.flatnonzero(launch >= 0)
    if not len(rows):
        return None, None, None
    called = np.minimum(trace.host.start_ns[launch[rows]], work.start_ns[rows])
    times = np.concatenate((called, work.start_ns[rows]))
    change = np.repeat(np.array([1, -1], np.int64), len(rows))
    order = np.lexsort((-change, times))
    depth = np.cumsum(change[order])
    held = np.diff(times[order], append=max(int(times.max()), int(work.end_ns.max())))
    span = int(held.sum())
    if not span:
        return None, int(depth.max()), None
    mean, empty = (depth * held).sum() / span, held[depth == 0].sum() / span
    return float(mean), int(depth.max()), float(empty)


def _quantile(values: Int64s, share: float) -> int | None:
    return int(quantile(values, share)) if len(values) else None


def no_launches() -> Launches:
    """For a rank without a device."""
    unknown = ("latency_p50_ns", "latency_p90_ns", "queue_mean", "queue_max", "queue_empty_share")
    fields: dict[str, Any] = dict.fromkeys(Launches.__struct_fields__, 0) | dict.fromkeys(unknown)
    return Launches(**fields)


# Copies and memsets by name: how many, how large, how fast, and how much of it is exposed.


def list_copies(trace: Trace, work: Work) -> tuple[Copy, ...]:
    """Longest total first. Exposed time is what ran while neither compute nor comm did."""
    if work.on_host:
        return ()
    mine = work.kind == Kind.MEMORY
    name = trace.device.name[work.rows]
    others = intervals.union_all((work.compute, work.comm))
    out = []
    for code in distinct(name[mine]).tolist():
        rows = np.flatnonzero(mine & (name == code))
        total = int((work.end_ns[rows] - work.start_ns[rows]).sum())
        sizes = trace.device.size_bytes[work.rows[rows]]
        size = int(sizes.sum()) if (sizes >= 0).all() else None
        covered = intervals.union(work.start_ns[rows], work.end_ns[rows])
        out.append(
            Copy(
                name=trace.strings[code],
                count=len(rows),
                total_ns=total,
                size_bytes=size,
                gb_s=size / total if size is not None and total else None,
                exposed_ns=intervals.length_outside(covered, others),
            )
        )
    return tuple(sorted(out, key=lambda copy: -copy.total_ns))
