"""Tracks as events of the Chrome JSON format: slices, instants and the names of tracks.

Times are written as exact decimals of microseconds, counted from the trace's own base.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from stepscope.records.trace import Trace

PROCESS_NAME = "stepscope"
CATEGORY = "stepscope"
_FIRST_PID = 900_000_001  # above any process id that Linux gives
_ABOVE_ALL = -1_000_000  # Perfetto sorts processes by this number


class Slice(NamedTuple):
    """A stretch of a track; on one track slices do not overlap. Without an end, an instant."""

    name: str
    start_ns: int
    end_ns: int | None
    args: dict[str, Any]


class Track(NamedTuple):
    name: str
    slices: Iterator[Slice]  # made while they are written


def track_events(tracks: Iterable[Track], trace: Trace, base_ns: int) -> Iterator[bytes]:
    """Events in a process of our own, each a JSON object."""
    pid = _free_pid(trace)
    yield _named("process_name", pid, 0, {"name": PROCESS_NAME})
    yield _named("process_sort_index", pid, 0, {"sort_index": _ABOVE_ALL})
    for number, track in enumerate(tracks, 1):
        yield _named("thread_name", pid, number, {"name": track.name})
        yield _named("thread_sort_index", pid, number, {"sort_index": number})
        for one in track.slices:
            yield msgspec.json.encode(_event(one, pid, number, base_ns))


def _event(one: Slice, pid: int, tid: int, base_ns: int) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "X",
        "cat": CATEGORY,
        "name": one_line(one.name),
        "pid": pid,
        "tid": tid,
        "ts": _microseconds(one.start_ns - base_ns),
    }
    if one.end_ns is None:
        event |= {"ph": "i", "s": "t"}
    else:
        event["dur"] = _microseconds(one.end_ns - one.start_ns)
    return {**event, "args": one.args} if one.args else event


def _named(kind: str, pid: int, tid: int, args: dict[str, Any]) -> bytes:
    event = {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}
    return msgspec.json.encode(event)


def _microseconds(ns: int) -> msgspec.Raw:
    whole, rest = divmod(abs(ns), 1000)
    return msgspec.Raw(f"{'-' if ns < 0 else ''}{whole}.{rest:03d}".encode())


def _free_pid(trace: Trace) -> int:
    """A process id that no event of the trace has."""
    taken = {thread.pid for thread in trace.threads}
    pid = _FIRST_PID
    while str(pid) in taken:
        pid += 1
    return pid
