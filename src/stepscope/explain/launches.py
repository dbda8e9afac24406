"""How work reached the device: launch latency, queue depth, short kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.explain.quantiles import quantile
from stepscope.explain.work import launches_of
from stepscope.records.explanation import Launches
from stepscope.records.trace import DeviceKind
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from stepscope.explain.arrays import Int32s, Int64s
    from stepscope.explain.work import Work
    from stepscope.records.trace import Trace

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
