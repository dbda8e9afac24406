"""Which events fit in the timeline: whole steps, so that holes mean idle time; if not even one
fits, the longest events of every lane. The page says how many are left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stepscope.records.words import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.explanation import Step
    from stepscope.records.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSelection:
    """Rows that are drawn; `detail` says what was left out, or nothing."""

    host: NDArray[np.int64]
    device: NDArray[np.int64]
    window_ns: tuple[int, int] | None
    detail: str


def select_events(
    trace: Trace, steps: tuple[Step, ...], device_lane: NDArray[np.int32], max_events: int
) -> EventSelection:
    """All rows if they fit, else whole steps, else the longest events."""
    total = len(trace.host) + len(trace.device)
    if total <= max_events:
        return EventSelection(
            host=np.arange(len(trace.host)),
            device=np.arange(len(trace.device)),
            window_ns=None,
            detail="",
        )
    return _whole_steps(trace, steps, max_events) or _longest(trace, device_lane, max_events)


def _whole_steps(trace: Trace, steps: tuple[Step, ...], max_events: int) -> EventSelection | None:
    """The longest run of consecutive steps that fits; the last of several."""
    if len(steps) < 2:
        return None
    edges = np.array([steps[0].start_ns, *(s.start_ns + s.dur_ns for s in steps)], dtype=np.int64)
    before = np.searchsorted(np.sort(trace.host.start_ns), edges)
    before = before + np.searchsorted(trace.device.start_ns, edges)
    # Events that began earlier and reach into the window come on top: leave room for them.
    room = int(max_events * 0.97)
    stop = np.searchsorted(before, before + room, side="right") - 1
    length = stop - np.arange(len(edges))
    if length.max() < 1:
        return None
    first = int(len(length) - 1 - np.argmax(length[::-1]))
    last = int(stop[first])
    window = (int(edges[first]), int(edges[last]))
    host, device = _inside(trace, window)
    if len(host) + len(device) > max_events:
        return None
    names = steps[first].name
    if last - first > 1:
        names += f" to {steps[last - 1].name}"
    total = len(trace.host) + len(trace.device)
    return EventSelection(
        host=host,
        device=device,
        window_ns=window,
        detail=f"The timeline shows {names}: {len(host) + len(device):,} of "
        f"{counted(total, 'event')} ({last - first} of {counted(len(steps), 'step')}). "
        "Tables and flame graphs cover everything.",
    )


def _inside(trace: Trace, window: tuple[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    start, end = window
    host, device = trace.host, trace.device
    in_host = (host.start_ns < end) & (host.start_ns + host.dur_ns > start)
    in_device = (device.start_ns < end) & (device.start_ns + device.dur_ns > start)
    return np.flatnonzero(in_host), np.flatnonzero(in_device)


def _longest(trace: Trace, device_lane: NDArray[np.int32], max_events: int) -> EventSelection:
    """The same share of every lane, longest first: no lane crowds out another."""
    total = len(trace.host) + len(trace.device)
    lane = np.concatenate([device_lane, trace.host.thread + (device_lane.max(initial=-1) + 1)])
    dur = np.concatenate([trace.device.dur_ns, trace.host.dur_ns])
    order = np.lexsort((-dur, lane))
    _, first, count = np.unique(lane[order], return_index=True, return_counts=True)
    place = np.arange(total) - np.repeat(first, count)
    quota = count * max_events // total
    rows = np.sort(order[place < np.repeat(quota, count)])
    devices = len(trace.device)
    return EventSelection(
        host=rows[rows >= devices] - devices,
        device=rows[rows < devices],
        window_ns=None,
        detail=f"The timeline shows the longest {len(rows):,} of {counted(total, 'event')}: a "
        "hole may be work too short to be drawn. Tables and flame graphs cover everything.",
    )
