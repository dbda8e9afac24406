"""Place events in lanes, one per stream and thread and one row per depth; draw one step of a
run so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from markupsafe import Markup

from stepscope.errors import StepscopeError
from stepscope.records.explanation import RankExplanation, Step
from stepscope.records.trace import DeviceEvents, HostEvents, HostKind, Thread, Trace
from stepscope.text.figures import duration
from stepscope.ui.html.render import EVENT_CLASSES, device_classes, host_classes, is_work
from stepscope.ui.html.svg import line, rect, text
from stepscope.ui.words import short_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.comparison import Side

    Ints = NDArray[np.int64]
    Bands = list[tuple[str, NDArray[np.bool_]]]  # name, which events lie in it

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


def _thread_name(thread: Thread, *, main: bool, backward: bool) -> str:
    tid = thread.tid
    if tid.startswith("-") and tid[1:].isdecimal():
        tid = str(int(tid) % (1 << 32))  # some traces have 32 bits with a sign
    own = thread.name.strip() or f"thread {tid}"
    if main:
        return f"Main · {own}"
    return f"Backward · {own}" if backward else own[:1].upper() + own[1:]


# One step of a run as lanes: its streams and threads, small enough to draw two of them as SVG.

MOST_LANES = 3  # of streams, and of threads
MOST_ROWS = 4  # of a lane
_FINEST = 800  # shorter than this part of the step, events of one colour are drawn as one
_LABELLED = 0.06  # of the axis: a wider block carries its name
_ROW, _NAME, _GAP, _HEAD, _AXIS = 15, 15, 5, 22, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBlock:
    """One event, or several short ones of one colour in a row."""

    start_ns: int
    dur_ns: int
    color: str
    name: str
    count: int


class StepLane(NamedTuple):
    """A stream or a thread, as rows of blocks."""

    name: str
    rows: tuple[tuple[EventBlock, ...], ...]


class StepLanes(NamedTuple):
    """One step of one rank."""

    name: str
    span_ns: int
    lanes: tuple[StepLane, ...]


def lanes_of_side(side: Side, *, cache: bool = True) -> StepLanes | None:
    """The median step of the last run that has a trace; None without any."""
    from stepscope.explain.rank import explain_file
    from stepscope.trace.discover import find_traces
    from stepscope.trace.read import ReadOptions

    for run in reversed(side.runs):
        try:
            files = find_traces(run.path)
            wanted = f"rank-{run.rank or 0:05d}"
            file = next((file for file in files if wanted in str(file)), files[0])
            explained = explain_file(
                file,
                lambda analysis, rank: step_lanes(analysis.trace, rank),
                options=ReadOptions(cache=cache),
            )
        except StepscopeError:
            continue
        return explained.results[0] if explained.results else None
    return None


def step_lanes(trace: Trace, rank: RankExplanation) -> StepLanes | None:
    """The step of median length; None where the trace has none."""
    steps = sorted(rank.steps.steps, key=lambda step: step.dur_ns)
    if not steps:
        return None
    step = steps[len(steps) // 2]
    host = trace.host
    lane_of, stream_names, work = stream_lanes(trace)
    thread_name = thread_names(trace)
    # Without Python frames, which would push operators out of sight.
    drawn = host.kind != HostKind.PYTHON
    streams = [
        (stream_names[number], lane_of == number)
        for number in range(len(stream_names))
        if work[number]
    ]
    threads = [
        (thread_name[thread], drawn & (host.thread == thread))
        for thread in thread_order(trace)[:MOST_LANES]
    ]
    lanes: list[StepLane] = []
    sides: list[tuple[DeviceEvents | HostEvents, NDArray[np.uint8], Bands]] = [
        (trace.device, device_classes(trace, rank), streams),
        (host, host_classes(trace, rank), threads),
    ]
    for events, classes, bands in sides:
        mine: list[StepLane] = []
        inside = _inside(events.start_ns, events.dur_ns, step)
        for name, belongs in bands:
            rows = np.flatnonzero(inside & belongs)
            if rows.size and len(mine) < MOST_LANES:
                columns = events.start_ns[rows], events.dur_ns[rows], events.name[rows]
                mine.append(_lane(name, *columns, classes[rows], step, trace.strings))
        lanes += mine
    return StepLanes(name=step.name, span_ns=step.dur_ns, lanes=tuple(lanes))


def _inside(start: Ints, dur: Ints, step: Step) -> NDArray[np.bool_]:
    return (start + dur > step.start_ns) & (start < step.start_ns + step.dur_ns) & (dur > 0)


def _lane(
    name: str,
    start: Ints,
    dur: Ints,
    names: NDArray[np.int32],
    classes: NDArray[np.uint8],
    step: Step,
    strings: Sequence[str],
) -> StepLane:
    end = np.minimum(start + dur - step.start_ns, step.dur_ns)
    start = np.maximum(start - step.start_ns, 0)
    finest = step.dur_ns / _FINEST
    level = overlap_rows(start, end)
    rows = []
    for depth in range(min(int(level.max()) + 1, MOST_ROWS)):
        mine = np.flatnonzero(level == depth)
        mine = mine[np.lexsort((-end[mine], start[mine]))]
        begins, ends, kinds = start[mine], end[mine], classes[mine]
        short = ends - begins < finest
        near = begins[1:] - ends[:-1] < finest
        joins = short[1:] & short[:-1] & (kinds[1:] == kinds[:-1]) & near
        first = np.flatnonzero(np.concatenate(([True], ~joins)))
        until = np.maximum.reduceat(ends, first)
        counts = np.diff(np.append(first, len(begins)))
        rows.append(
            tuple(
                EventBlock(
                    start_ns=int(begins[row]),
                    dur_ns=int(stop - begins[row]),
                    color=EVENT_CLASSES[kinds[row]],
                    name=strings[names[mine[row]]],
                    count=int(count),
                )
                for row, stop, count in zip(
                    first.tolist(), until.tolist(), counts.tolist(), strict=True
                )
            )
        )
    return StepLane(name=name, rows=tuple(rows))


def draw_pair(a: StepLanes, b: StepLanes) -> Markup:
    """A's step over B's on one axis. Places are percentages, so that text stays readable."""
    span = max(a.span_ns, b.span_ns)
    parts: list[str] = []
    top = 0
    for title, side in (("A", a), ("B", b)):
        parts.append(text("who", 0, top + 15, f"{title} · {duration(side.span_ns)}"))
        top += _HEAD
        for lane in side.lanes:
            parts.append(text("lane", 0, top + 11, lane.name))
            top += _NAME
            for row in lane.rows:
                parts += [_block(block, top, span) for block in row]
                top += _ROW
            top += _GAP
        if side.span_ns < span:
            at = f"{100 * side.span_ns / span:.3f}%"
            parts.append(line("end", at, at, top - 34, top))
        top += _GAP
    ticks = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        kind = "" if share == 0 else "is-end" if share == 1 else "is-middle"
        at, words = f"{100 * share:g}%", duration(share * span) if share else "0"
        ticks.append(line("grid", at, at, 0, top) + text(kind, at, top + 14, words))
    return Markup(
        f'<svg class="steps-svg" width="100%" height="{top + _AXIS}" role="img" '
        f'aria-label="One step of A and one of B on one time axis">{"".join(ticks + parts)}</svg>'
    )


def _block(block: EventBlock, top: int, span_ns: int) -> str:
    left, width = 100 * block.start_ns / span_ns, 100 * block.dur_ns / span_ns
    name = short_kernel(block.name, 60)
    many = f"{block.count} short ones from {name}" if block.count > 1 else name
    title = f"{many}: {duration(block.dur_ns)}"
    style, height = f"fill:var(--c-{block.color})", _ROW - 2
    if width < 100 * _LABELLED or block.count > 1:
        wide = f"{max(width, 0.04):.3f}%"
        return rect("", f"{left:.3f}%", top, wide, height, style=style, title=title)
    return (  # an inner drawing cuts off what does not fit
        f'<svg x="{left:.3f}%" y="{top}" width="{width:.3f}%" height="{height}">'
        + rect("", 0, 0, "100%", height, rx=1.5, style=style, title=title)
        + text("inside", 4, 10, name)
        + "</svg>"
    )
