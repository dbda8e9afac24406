"""What HTA 0.5.0 and TraceLens compute, restated over our columns.

Written from their documented behaviour (see test_peers.py for the list); no code of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.records.trace import DeviceKind, HostKind, Trace

Number = Any  # whole ns or µs, or TraceLens's doubles
Span = tuple[Number, Number]
HTA_KERNEL_DELAY_US = 30
_HTA_COMM = re.compile(r"nccl.*Kernel")
_HTA_MEMORY = re.compile(r"Memcpy|Memset|dma")
_HTA_NOT_COMPUTE = re.compile(r".*Memcpy|Memset|.*Sync")
_TRACELENS_COMM = re.compile(r"nccl|rccl|cross_device_reduce")


def merge(spans: Iterable[Span]) -> list[Span]:
    """Sorted and disjoint; touching spans become one. A span may end before it starts."""
    out: list[Span] = []
    for start, end in sorted(spans, key=lambda span: span[0]):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def length(spans: Iterable[Span]) -> Number:
    """Time covered by merged spans."""
    return sum(end - start for start, end in spans)


def subtract(a: list[Span], b: list[Span]) -> list[Span]:
    """Merged spans less merged spans."""
    out = []
    for start, end in a:
        for low, high in b:
            if high <= start:
                continue
            if low >= end:
                break
            if low > start:
                out.append((start, low))
            start = high
            if start >= end:
                break
        if start < end:
            out.append((start, end))
    return out


@dataclass(frozen=True)
class HtaRow:
    """A device event as HTA sees it."""

    name: str
    stream: int
    start: int
    end: int
    called: int | None
    work: bool


def hta_rows(trace: Trace, *, unsigned_streams: bool = False) -> list[HtaRow]:
    """Device events in whole µs: starts rounded up, ends down, the last step's launches dropped.

    cuda_sync rows count where they name a stream. Older Kineto wrote "no stream" as 2**32 - 1,
    which HTA takes for one (`unsigned_streams`).
    """
    host, device = trace.host, trace.device
    names = [trace.strings[code] for code in device.name.tolist()]
    begins = _hta_last_step(trace)
    calls = _hta_calls(trace)
    rows = []
    for i, name in enumerate(names):
        kind, stream = device.kind[i], int(device.stream[i])
        if kind > DeviceKind.SYNC or (stream < 0 and not unsigned_streams):
            continue
        call = calls.get(int(device.correlation[i]))
        if begins is not None and (call is None or _ceil(int(host.start_ns[call])) >= begins):
            continue
        start = int(device.start_ns[i])
        rows.append(
            HtaRow(
                name=name,
                stream=stream,
                start=_ceil(start),
                end=(start + int(device.dur_ns[i])) // 1000,
                called=None if call is None else _ceil(int(host.start_ns[call])),
                work=bool(kind <= DeviceKind.MEMSET),
            )
        )
    return rows


def _ceil(ns: int) -> int:
    return -(-ns // 1000)


def _hta_calls(trace: Trace) -> dict[int, int]:
    rows = np.flatnonzero(trace.host.kind == HostKind.RUNTIME).tolist()
    return {int(trace.host.correlation[row]): row for row in rows}


def _hta_last_step(trace: Trace) -> int | None:
    """When the last ProfilerStep begins, on whichever of the two timelines is later."""
    marks = {
        trace.strings[name]
        for name in trace.host.name.tolist()
        if "ProfilerStep" in trace.strings[name]
    }
    if len(marks) < 2:
        return None
    begins = [
        int(table.start_ns[i])
        for table in (trace.host, trace.device)
        for i, name in enumerate(table.name.tolist())
        if "ProfilerStep" in trace.strings[name]
    ]
    return _ceil(max(begins))


def hta_kind(name: str) -> str:
    """By name alone."""
    if _HTA_COMM.match(name):
        return "comm"
    if _HTA_MEMORY.match(name):
        return "memory"
    return "other" if _HTA_NOT_COMPUTE.match(name) else "compute"


def hta_breakdown(rows: list[HtaRow]) -> dict[str, int]:
    """get_temporal_breakdown, in whole µs. Its assertions are part of what it does."""
    busy = merge((row.start, row.end) for row in rows)
    compute = merge((row.start, row.end) for row in rows if hta_kind(row.name) == "compute")
    span = busy[-1][1] - busy[0][0]
    idle = span - length(busy)
    non_compute = span - length(compute) - idle
    assert idle <= span
    assert length(compute) <= span
    assert non_compute >= 0
    return {"idle": idle, "compute": length(compute), "non_compute": non_compute, "span": span}


def hta_overlap_percent(rows: list[HtaRow]) -> float | None:
    """get_comm_comp_overlap."""
    comm = merge((row.start, row.end) for row in rows if hta_kind(row.name) == "comm")
    compute = merge((row.start, row.end) for row in rows if hta_kind(row.name) == "compute")
    if not length(comm):
        return None
    hidden = length(comm) - length(subtract(comm, compute))
    return round(100 * hidden / length(comm), 2)


def hta_idle(rows: list[HtaRow]) -> dict[int, dict[str, int]]:
    """get_idle_time_breakdown: per stream, gap = start - the row before's end (may be negative)."""
    out: dict[int, dict[str, int]] = {}
    for stream in {row.stream for row in rows if row.work}:
        mine = sorted(
            (row for row in rows if row.work and row.stream == stream), key=lambda r: r.start
        )
        split = {"host_wait": 0, "kernel_wait": 0, "other": 0}
        for before, row in pairwise(mine):
            gap = row.start - before.end
            if row.called is not None and row.called > before.end:
                split["host_wait"] += gap
            elif gap < HTA_KERNEL_DELAY_US:
                split["kernel_wait"] += gap
            else:
                split["other"] += gap
        out[stream] = split
    return out


@dataclass(frozen=True)
class TraceLensSets:
    """Merged spans of TraceLens's three kinds, of the device events it keeps."""

    compute: list[Span]
    comm: list[Span]
    memcpy: list[Span]

    @property
    def busy(self) -> list[Span]:
        """All kinds together."""
        return merge([*self.compute, *self.comm, *self.memcpy])


def tracelens_keeps(trace: Trace) -> NDArray[np.bool_]:
    """Per device row: is an arrow drawn to it from a launch in the file?

    Kineto draws one from every launch but hipMemsetAsync.
    """
    device, host = trace.device, trace.host
    launch = np.maximum(device.launch, 0)
    arrow = np.array([name != "hipMemsetAsync" for name in trace.strings])[host.name[launch]]
    return (device.kind <= DeviceKind.MEMSET) & (device.launch >= 0) & arrow


def tracelens_sets(trace: Trace, *, base_ns: int | None = None) -> TraceLensSets:
    """Only what it keeps; a memset is computation. Exact ns, or µs as it holds them.

    TraceLens adds and subtracts doubles of µs since the file's base, a few 1e12: its sums carry
    the noise of a double there (0.5 ns an edge), which `base_ns` reproduces.
    """
    device = trace.device
    spans: dict[str, list[Span]] = {"compute": [], "comm": [], "memcpy": []}
    for i in np.flatnonzero(tracelens_keeps(trace)).tolist():
        kind = "memcpy" if device.kind[i] == DeviceKind.MEMCPY else "compute"
        if kind == "compute" and _TRACELENS_COMM.search(trace.strings[device.name[i]]):
            kind = "comm"
        start, dur = int(device.start_ns[i]), int(device.dur_ns[i])
        if base_ns is None:
            spans[kind].append((start, start + dur))
        else:
            microseconds = (start - base_ns) / 1000
            spans[kind].append((microseconds, microseconds + dur / 1000))
    return TraceLensSets(**{kind: merge(each) for kind, each in spans.items()})


def tracelens_ms(sets: TraceLensSets) -> dict[str, str]:
    """Its summary of sets in µs, as printed: milliseconds with six decimals."""
    busy = sets.busy
    total = busy[-1][1] - busy[0][0]
    figures = {
        "computation": length(sets.compute),
        "exposed_comm": length(subtract(sets.comm, sets.compute)),
        "exposed_memcpy": length(subtract(subtract(sets.memcpy, sets.compute), sets.comm)),
        "idle": total - length(busy),
        "total": total,
    }
    return {name: f"{microseconds / 1e3:.6f}" for name, microseconds in figures.items()}
