"""Where every event is drawn: one lane per stream and thread, one row per depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from stepscope.records.trace import HostKind
from stepscope.ui.html.classes import is_work

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.trace import Thread, Trace

MAX_OVERLAP_ROWS = 8  # kernels that overlap more share the last row


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One band of the timeline, `rows` deep."""

    name: str
    group: Literal["device", "host"]
    work: bool  # device work; idle gaps are drawn behind it
    first_row: int
    rows: int
    events: int


def stack_depth(parent: NDArray[np.int32] | NDArray[np.int64]) -> NDArray[np.int32]:
    """How many rows enclose each one: climbs all stacks at once, one level per turn."""
    depth = np.zeros(len(parent), dtype=np.int32)
    rows = np.flatnonzero(parent >= 0)
    above = parent[rows]
    while rows.size:
        depth[rows] += 1
        further = parent[above] >= 0
        rows, above = rows[further], parent[above[further]]
    return depth


def stream_lanes(trace: Trace) -> tuple[NDArray[np.int32], tuple[str, ...], tuple[bool, ...]]:
    """Lane of every device event, the lanes' names, and which hold work; busiest work first."""
    device = trace.device
    if not len(device):
        return np.zeros(0, dtype=np.int32), (), ()
    describes = ~is_work(device.kind)
    key = np.stack([describes, device.device, device.stream], axis=1).astype(np.int64)
    keys, lane = np.unique(key, axis=0, return_inverse=True)
    lane = lane.reshape(-1)
    busy = np.bincount(lane, weights=device.dur_ns)
    order = np.lexsort((-busy, keys[:, 1], keys[:, 0]))
    rank = np.empty(len(order), dtype=np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    several = len(np.unique(keys[keys[:, 1] >= 0, 1])) > 1
    names = tuple(_stream_name(keys[row].tolist(), several=several) for row in order)
    return rank[lane], names, tuple((keys[order, 0] == 0).tolist())


def _stream_name(key: list[int], *, several: bool) -> str:
    describes, device, stream = key
    where = f"Device {device} · " if several and device >= 0 else ""
    what = "Stream" if stream >= 0 else "No stream"
    number = f" {stream}" if stream >= 0 else ""
    return f"{where}{what}{number}{' · annotations' if describes else ''}"


def overlap_rows(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int32]:
    """Rows in which the events of one lane do not overlap.

    A row takes every event that starts after all earlier ones have ended; the rest try the next.
    """
    row = np.zeros(len(start), dtype=np.int32)
    left = np.lexsort((-end, start))
    for level in range(MAX_OVERLAP_ROWS):
        if not left.size:
            break
        row[left] = level
        before = np.maximum.accumulate(end[left])[:-1]
        free = np.concatenate([[True], start[left][1:] >= before])
        left = left[~free]
    return row


def thread_order(trace: Trace) -> list[int]:
    """Threads that have events: the one with the steps first, then the busiest."""
    used, count = np.unique(trace.host.thread, return_counts=True)
    main = main_thread(trace)
    pairs = sorted(zip(used.tolist(), count.tolist(), strict=True), key=lambda p: (-p[1], p[0]))
    return sorted((thread for thread, _ in pairs), key=lambda thread: thread != main)


def thread_names(trace: Trace) -> dict[int, str]:
    """What people call each thread: main, backward, or the name in the file."""
    main, backward = main_thread(trace), _backward_threads(trace)
    return {
        thread: _thread_name(
            trace.threads[thread], main=thread == main, backward=thread in backward
        )
        for thread in np.unique(trace.host.thread).tolist()
    }


def main_thread(trace: Trace) -> int:
    """The thread with the step annotations; without any, the one with the most events."""
    host = trace.host
    if not len(host):
        return -1
    named = np.flatnonzero(host.kind == HostKind.ANNOTATION)
    codes = np.unique(host.name[named])
    steps = [c for c in codes.tolist() if trace.strings[c].startswith("ProfilerStep")]
    rows = named[np.isin(host.name[named], steps)]
    return int(np.bincount(host.thread[rows] if rows.size else host.thread).argmax())


def _backward_threads(trace: Trace) -> set[int]:
    host = trace.host
    operators = np.flatnonzero(host.kind == HostKind.OPERATOR)
    codes = np.unique(host.name[operators]).tolist()
    engine = [c for c in codes if trace.strings[c].startswith("autograd::engine")]
    return set(np.unique(host.thread[operators[np.isin(host.name[operators], engine)]]).tolist())


def _unsigned(tid: str) -> str:
    """Traces hold some thread numbers as 32 bits with a sign."""
    return str(int(tid) % (1 << 32)) if tid.startswith("-") and tid[1:].isdecimal() else tid


def _thread_name(thread: Thread, *, main: bool, backward: bool) -> str:
    own = thread.name.strip() or f"thread {_unsigned(thread.tid)}"
    if main:
        return f"Main · {own}"
    return f"Backward · {own}" if backward else own[:1].upper() + own[1:]
