"""Take what the page draws of one rank from its trace while it is in memory, as many events
as fit in the timeline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from stepscope.records.explanation import RankExplanation, Step
from stepscope.records.trace import HostKind, Trace
from stepscope.text.words import counted
from stepscope.ui.html.flame import (
    Flame,
    LaunchedRows,
    StackRows,
    keep_widest,
    launched_by,
    merge_stacks,
    open_host_stacks,
    open_launches,
)
from stepscope.ui.html.lanes import (
    Lane,
    overlap_rows,
    stack_depth,
    stream_lanes,
    thread_names,
    thread_order,
)
from stepscope.ui.html.render import device_classes, host_classes, is_work

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.compiled.graph_kernels import OpenedRegions

    Ints = NDArray[np.int64]

# A picture is small enough to be sent between processes: the trace never leaves its worker.

ANY_STEP = "ProfilerStep#*"
UNLINKED = "(launch not recorded)"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnEvents:
    """The timeline's events, sorted by row, then start. Times count from the picture's zero."""

    row_start: Ints  # where each row begins, and the end of the last
    start_ns: Ints
    dur_ns: Ints
    name: Ints  # index into RankPicture.strings
    kind: NDArray[np.uint8]  # index into EVENT_CLASSES
    link: Ints  # device event: the drawn event that launched it, or -1

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnGaps:
    """Idle gaps, drawn behind the device lanes, sorted by start."""

    start_ns: Ints
    dur_ns: Ints
    cause: NDArray[np.uint8]  # index into GAP_CAUSES
    frame: Ints  # index into RankPicture.strings, or -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMark:
    """One step on the picture's clock."""

    name: str
    start_ns: int
    dur_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPicture:
    """What the page needs about one rank besides its RankExplanation."""

    path: str
    rank: int | None
    span_ns: int
    strings: tuple[str, ...]
    lanes: tuple[Lane, ...]
    events: DrawnEvents
    gaps: DrawnGaps
    steps: tuple[StepMark, ...]
    host_flame: Flame
    device_flame: Flame
    left_out: str  # a sentence when events were left out


class _LaneStack:
    """Events of one side, host or device, with their rows, before sorting."""

    def __init__(self, rows: Ints, group: Literal["device", "host"], first_row: int) -> None:
        self.rows = rows  # row numbers in the trace's columns
        self.row = np.zeros(len(rows), dtype=np.int64)  # row on the page
        self.lanes: tuple[Lane, ...] = ()
        self._group, self._first = group, first_row

    def add(self, name: str, mine: Ints, level: NDArray[np.int32], *, work: bool) -> None:
        """Put a lane under those that are there; `mine` are its events."""
        deep = int(level.max()) + 1
        self.row[mine] = self._first + level
        lane = Lane(
            name=name,
            group=self._group,
            work=work,
            first_row=self._first,
            rows=deep,
            events=len(mine),
        )
        self.lanes += (lane,)
        self._first += deep


def draw_rank(
    trace: Trace,
    rank: RankExplanation,
    opened: OpenedRegions | None = None,
    *,
    max_events: int = 200_000,
) -> RankPicture:
    """The picture of one rank; events beyond `max_events` are left out of the timeline only.

    `opened` are the lines and kernels of compiled graphs, for the flame graphs.
    """
    depth = stack_depth(trace.host.parent)
    stream_lane, stream_names, stream_work = stream_lanes(trace)
    selection = select_events(trace, rank.steps.steps, stream_lane, max_events)
    device = _place_device(trace, selection.device, stream_lane, stream_names, stream_work)
    host = _place_host(
        trace, selection.host, depth, first_row=sum(lane.rows for lane in device.lanes)
    )
    names = _NameTable(trace)
    host_class, device_class = host_classes(trace, rank), device_classes(trace, rank)
    host_flame, device_flame = _flames(trace, host_class, device_class, names, opened)
    zero, end = _window(trace, rank, selection)
    events = _merge_sides(trace, device, host, host_class, device_class, zero)
    gaps = _drawn_gaps(trace, rank, zero, end)
    used, strings = names.used(
        events.name, gaps.frame[gaps.frame >= 0], host_flame.name, device_flame.name
    )
    return RankPicture(
        path=rank.path,
        rank=rank.rank,
        span_ns=end - zero,
        strings=strings,
        lanes=device.lanes + host.lanes,
        events=replace(events, name=np.searchsorted(used, events.name)),
        gaps=replace(gaps, frame=np.where(gaps.frame >= 0, np.searchsorted(used, gaps.frame), -1)),
        steps=_step_marks(rank, zero, end),
        host_flame=replace(host_flame, name=np.searchsorted(used, host_flame.name)),
        device_flame=replace(device_flame, name=np.searchsorted(used, device_flame.name)),
        left_out=selection.detail,
    )


class _NameTable:
    """The trace's strings and those that the page adds, numbered together."""

    def __init__(self, trace: Trace) -> None:
        self._strings = trace.strings
        self._extra: list[str] = []

    def add(self, text: str) -> int:
        self._extra.append(text)
        return len(self._strings) + len(self._extra) - 1

    def used(self, *columns: Ints) -> tuple[Ints, tuple[str, ...]]:
        """The numbers that occur, sorted, and their texts."""
        codes = np.unique(np.concatenate(columns))
        base = len(self._strings)
        texts = [
            "" if code < 0 else self._strings[code] if code < base else self._extra[code - base]
            for code in codes.tolist()
        ]
        return codes, tuple(texts)


def _place_device(
    trace: Trace,
    rows: Ints,
    lane_of: NDArray[np.int32],
    names: tuple[str, ...],
    work: tuple[bool, ...],
) -> _LaneStack:
    placed = _LaneStack(rows, "device", first_row=0)
    for number, name in enumerate(names):
        mine = np.flatnonzero(lane_of[rows] == number)
        if mine.size:
            start = trace.device.start_ns[rows[mine]]
            level = overlap_rows(start, start + trace.device.dur_ns[rows[mine]])
            placed.add(name, mine, level, work=work[number])
    return placed


def _place_host(
    trace: Trace, rows: Ints, depth: NDArray[np.int32], *, first_row: int
) -> _LaneStack:
    placed = _LaneStack(rows, "host", first_row)
    names = thread_names(trace)
    for thread in thread_order(trace):
        mine = np.flatnonzero(trace.host.thread[rows] == thread)
        if mine.size:
            placed.add(names[thread], mine, depth[rows[mine]], work=False)
    return placed


def _merge_sides(
    trace: Trace,
    device: _LaneStack,
    host: _LaneStack,
    host_class: NDArray[np.uint8],
    device_class: NDArray[np.uint8],
    zero: int,
) -> DrawnEvents:
    """Both sides in the order of the page; a device event links to its launch."""
    row = np.concatenate([device.row, host.row])
    start = np.concatenate([trace.device.start_ns[device.rows], trace.host.start_ns[host.rows]])
    dur = np.concatenate([trace.device.dur_ns[device.rows], trace.host.dur_ns[host.rows]])
    order = np.lexsort((-dur, start, row))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    link = np.full(len(order), -1, dtype=np.int64)
    link[place[: len(device.rows)]] = _launch_places(trace, device.rows, host.rows, place)
    rows = sum(lane.rows for lane in device.lanes + host.lanes)
    name = np.concatenate([trace.device.name[device.rows], trace.host.name[host.rows]])
    kind = np.concatenate([device_class[device.rows], host_class[host.rows]])
    return DrawnEvents(
        row_start=np.searchsorted(row[order], np.arange(rows + 1)),
        start_ns=start[order] - zero,
        dur_ns=dur[order],
        name=name[order].astype(np.int64),
        kind=kind[order],
        link=link,
    )


def _launch_places(trace: Trace, device_rows: Ints, host_rows: Ints, place: Ints) -> Ints:
    """Where the launch of each drawn device event is drawn, -1 if it is not."""
    drawn_at = np.full(len(trace.host) + 1, -1, dtype=np.int64)  # one more, for -1
    drawn_at[host_rows] = place[len(device_rows) :]
    launches: Ints = drawn_at[trace.device.launch[device_rows]]
    return launches


def _window(trace: Trace, rank: RankExplanation, selection: EventSelection) -> tuple[int, int]:
    """The picture's first and last nanosecond."""
    if selection.window_ns is not None:
        return selection.window_ns
    starts = [column.start_ns for column in (trace.host, trace.device) if len(column)]
    ends = [c.start_ns + c.dur_ns for c in (trace.host, trace.device) if len(c)]
    if not starts:
        return rank.timeline.start_ns, rank.timeline.start_ns + rank.timeline.span_ns
    return min(int(s.min()) for s in starts), max(int(e.max()) for e in ends)


def _flames(
    trace: Trace,
    host_class: NDArray[np.uint8],
    device_class: NDArray[np.uint8],
    names: _NameTable,
    opened: OpenedRegions | None,
) -> tuple[Flame, Flame]:
    threads = thread_order(trace)
    thread_name = {thread: names.add(text) for thread, text in thread_names(trace).items()}
    host, device = trace.host, trace.device
    rows = StackRows(
        parent=host.parent.astype(np.int64),
        thread=host.thread.astype(np.int64),
        dur_ns=host.dur_ns,
        name=_steps_as_one(trace, names.add(ANY_STEP)),
        kind=host_class,
    )
    work = is_work(device.kind)
    launched = LaunchedRows(
        launch=device.launch.astype(np.int64),
        dur_ns=device.dur_ns,
        name=device.name.astype(np.int64),
        kind=device_class,
        is_work=work,
    )
    has_pieces = opened is not None and len(opened.pieces) > 0
    if opened is not None and has_pieces and not work.any():
        rows = open_host_stacks(rows, opened, names.add)
    stacks = merge_stacks(rows, threads=threads, thread_name=thread_name)
    launching = stacks
    if opened is not None and has_pieces and work.any():
        below, launched = open_launches(rows, launched, opened, names.add)
        launching = merge_stacks(below, threads=threads, thread_name=thread_name)
    flame = launched_by(launching, launched.only_work(), unlinked_name=names.add(UNLINKED))
    return keep_widest(stacks.flame), keep_widest(flame)


def _steps_as_one(trace: Trace, any_step: int) -> Ints:
    """Host names with one name for all steps, so that their stacks merge."""
    host = trace.host
    name = host.name.astype(np.int64)
    annotations = np.unique(host.name[host.kind == HostKind.ANNOTATION]).tolist()
    steps = [code for code in annotations if trace.strings[code].startswith("ProfilerStep#")]
    name[np.isin(name, steps)] = any_step
    return name


def _drawn_gaps(trace: Trace, rank: RankExplanation, zero: int, end: int) -> DrawnGaps:
    gaps = rank.gaps
    if gaps is None:
        raise ValueError("the gaps are known only in the worker that read the trace")
    seen = (gaps.end_ns > zero) & (gaps.start_ns < end)
    start = np.maximum(gaps.start_ns[seen], zero)
    frame = gaps.frame[seen].astype(np.int64)
    return DrawnGaps(
        start_ns=start - zero,
        dur_ns=np.minimum(gaps.end_ns[seen], end) - start,
        cause=gaps.cause[seen].astype(np.uint8),
        frame=np.where(frame >= 0, trace.host.name[frame], -1) if len(trace.host) else frame,
    )


def _step_marks(rank: RankExplanation, zero: int, end: int) -> tuple[StepMark, ...]:
    return tuple(
        StepMark(name=step.name, start_ns=step.start_ns - zero, dur_ns=step.dur_ns)
        for step in rank.steps.steps
        if step.start_ns + step.dur_ns > zero and step.start_ns < end
    )


# Which events fit in the timeline: whole steps, so that holes mean idle time; if not even one fits,
# the longest events of every lane. The page says how many are left out.


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
