"""What decided when a rank's device was done: its critical path, followed back from the last event.

A device event began when the one before it on its stream ended, when another stream's work ended
that it waited for, or when the host launched it. The host came from the last call that waited for
the device, and that call from the device's work before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from stepscope.records.trace import DeviceEvents
from stepscope.step.arrays import Indices, Int64s
from stepscope.step.timeline import LAUNCH_LATENCY_NS

if TYPE_CHECKING:
    from stepscope.explain.rank_analysis import RankAnalysis

PathKind = Literal["device", "queue", "launch", "host", "sync"]
_NEVER = -(2**62)
_MOST_PIECES = 1_000_000


class DevicePiece(NamedTuple):
    """A stretch of the path; `row` is the device event or the blocking host call, or -1."""

    kind: PathKind
    start_ns: int
    end_ns: int
    row: int = -1


def device_path(analysis: RankAnalysis) -> list[DevicePiece]:
    """In the order of time, without gaps; empty where the CPU is the device."""
    if analysis.work.on_host or not len(analysis.work):
        return []
    pieces = _Walk(analysis).pieces()
    pieces.reverse()
    return pieces


class _Walk:
    """The columns that the path follows, as lists: one value at a time is read."""

    def __init__(self, analysis: RankAnalysis) -> None:
        work, trace, steps = analysis.work, analysis.trace, analysis.steps
        self._begin = steps.window_start_ns
        inside = np.flatnonzero(work.start_ns < steps.window_end_ns)
        rows = work.rows[inside]
        order = np.argsort(work.end_ns[inside], kind="stable")
        self._rows = rows[order]
        start, self._end = work.start_ns[inside][order], work.end_ns[inside][order]
        launch = trace.device.launch[self._rows]
        called = np.append(trace.host.start_ns, _NEVER)[launch]
        self._before = _previous_on_stream(trace.device, self._rows, start)
        self._start, self._called = start.tolist(), called.tolist()
        blocking = analysis.host_time.blocking
        ends = trace.host.start_ns[blocking] + trace.host.dur_ns[blocking]
        by_end = np.argsort(ends, kind="stable")
        self._calls, self._call_ends = blocking[by_end], ends[by_end]

    def pieces(self) -> list[DevicePiece]:
        """The latest first."""
        at, time = len(self._rows) - 1, int(self._end[-1]) if len(self._rows) else 0
        pieces: list[DevicePiece] = []
        for _ in range(_MOST_PIECES):
            if at < 0 or time <= self._begin:
                break
            start = max(self._begin, min(time, self._start[at]))
            self._add(pieces, "device", start, time, int(self._rows[at]))
            at, time = self._cause(pieces, at, start)
        return pieces

    def _add(
        self, pieces: list[DevicePiece], kind: PathKind, start: int, end: int, row: int = -1
    ) -> None:
        start = max(start, self._begin)
        if end > start:
            pieces.append(DevicePiece(kind, start, end, row))

    def _cause(self, pieces: list[DevicePiece], at: int, start: int) -> tuple[int, int]:
        """The device event that the path goes on with, and from when; -1 where it begins."""
        before, called = self._before[at], self._called[at]
        stream_free = int(self._end[before]) if before >= 0 else _NEVER
        other = min(self._ended_by(start), at - 1)
        other_end = int(self._end[other]) if other >= 0 else _NEVER
        waited = other_end > max(called, stream_free) and start - other_end < LAUNCH_LATENCY_NS
        if waited or stream_free >= called:
            follow, free = (other, other_end) if waited else (before, stream_free)
            self._add(pieces, "queue", free, start)
            return follow, min(free, start)
        return self._host(pieces, called, start)

    def _host(self, pieces: list[DevicePiece], called: int, start: int) -> tuple[int, int]:
        """The host was late: it comes from its last wait for the device."""
        called = min(called, start)
        self._add(pieces, "launch", called, start)
        place = int(np.searchsorted(self._call_ends, called, side="right")) - 1
        since = int(self._call_ends[place]) if place >= 0 else self._begin
        self._add(pieces, "host", since, called)
        if place < 0 or since <= self._begin:
            return -1, self._begin
        awaited = self._ended_by(since)
        ended = int(self._end[awaited]) if awaited >= 0 else self._begin
        self._add(pieces, "sync", ended, since, int(self._calls[place]))
        return awaited, ended

    def _ended_by(self, time: int) -> int:
        """The event that ended last, up to this time."""
        return int(np.searchsorted(self._end, time, side="right")) - 1


def _previous_on_stream(device: DeviceEvents, rows: Indices, start: Int64s) -> list[int]:
    """Of each event, by its place among the rows; -1 for a stream's first."""
    stream = device.device[rows].astype(np.int64) << 32 | device.stream[rows].astype(np.int64)
    order = np.lexsort((start, stream))
    before = np.full(len(rows), -1, np.int64)
    same = stream[order[1:]] == stream[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    result: list[int] = before.tolist()
    return result
