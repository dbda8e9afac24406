"""Five ways to change a graph: select, scale, insert, remove, reorder. What-ifs are made of them.

Every function gives a new graph; what it was given stays as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.call_tree import distinct_places
from stepscope.explain.replay.graph import CallKind, Calls, Tasks

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from stepscope.explain.replay.graph import Flags, Floats, Ints, StepGraph
    from stepscope.records.trace import Trace

_HOST_TIMES = ("gap_ns", "call_ns")


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Some calls and the tasks that are meant with them."""

    calls: Flags
    tasks: Flags


def select(
    graph: StepGraph, trace: Trace, matches: Callable[[str], object], *, phase: int | None = None
) -> Selection:
    """Tasks whose kernel or outermost operator has a matching name, and calls that launch them.

    A call is selected when its operator matches or all of its tasks are.
    """
    calls, tasks = graph.calls, graph.tasks
    by_operator = _named(trace, trace.host.name, calls.operator, matches)
    column = trace.host.name if graph.on_host else trace.device.name
    wanted = _named(trace, column, tasks.row, matches) | by_operator[tasks.call]
    launched = np.bincount(tasks.call, minlength=len(calls))
    hit = np.bincount(tasks.call[wanted], minlength=len(calls))
    called = by_operator | ((launched > 0) & (hit == launched))
    if phase is not None:
        called &= calls.phase == phase
        wanted &= calls.phase[tasks.call] == phase
    return Selection(calls=called, tasks=wanted)


def _named(
    trace: Trace, names: Ints, rows: Ints, matches: Callable[[str], object]
) -> NDArray[np.bool_]:
    if not len(rows) or not len(names):
        return np.zeros(len(rows), np.bool_)
    codes = np.where(rows >= 0, names[np.maximum(rows, 0)], -1)
    distinct, of = distinct_places(codes)
    found = [code >= 0 and bool(matches(trace.strings[code])) for code in distinct.tolist()]
    return np.array(found, np.bool_)[of]


def scale_tasks(graph: StepGraph, tasks: Flags, factor: float | Floats) -> StepGraph:
    """Durations of some tasks."""
    scaled = np.where(tasks, graph.tasks.dur_ns * factor, graph.tasks.dur_ns)
    return replace(graph, tasks=replace(graph.tasks, dur_ns=scaled))


def scale_calls(graph: StepGraph, calls: Flags, factor: float | Floats) -> StepGraph:
    """The host's time of some calls, with the gaps before them."""
    names = {
        name: np.where(calls, getattr(graph.calls, name) * factor, getattr(graph.calls, name))
        for name in _HOST_TIMES
    }
    return replace(graph, calls=replace(graph.calls, **names))


def remove(graph: StepGraph, chosen: Selection, *, with_gaps: bool = True) -> StepGraph:
    """Calls and tasks, and the host's time that led to those calls unless told to keep it.

    A task that waited for a removed one no longer waits; a call that lost only some of its tasks
    stays.
    """
    calls, tasks = graph.calls, graph.tasks
    keep_task = ~(chosen.tasks | chosen.calls[tasks.call])
    keep_call = ~chosen.calls
    gaps = calls.gap_ns
    if not with_gaps:
        gaps = _gaps_carried(calls, keep_call)
    kept = replace(_some_calls(calls, keep_call), gap_ns=gaps[keep_call])
    number = np.cumsum(keep_call, dtype=np.int32) - 1
    task_number = np.where(keep_task, np.cumsum(keep_task, dtype=np.int32) - 1, -1)
    left = _some_tasks(tasks, keep_task)
    after = np.where(left.after >= 0, task_number[np.maximum(left.after, 0)], -1)
    return replace(
        graph,
        calls=kept,
        tasks=replace(left, call=number[left.call], after=after.astype(np.int32)),
    )


def _gaps_carried(calls: Calls, keep: Flags) -> Floats:
    """The gaps of removed calls, with what the calls took, go to the next call that stays."""
    group: NDArray[np.int64] = (
        np.cumsum(keep) - keep
    )  # the kept call that a removed one comes before
    lost = np.where(keep, 0.0, calls.gap_ns)
    summed = np.bincount(group, lost, minlength=len(calls) + 1)
    gaps = calls.gap_ns.copy()
    places = np.flatnonzero(keep)
    gaps[places] += summed[: len(places)]
    return gaps


def insert(
    graph: StepGraph,
    before: Ints,
    *,
    gap_ns: float | Floats,
    call_ns: float | Floats,
    dur_ns: float | Floats,
    stream: int | Ints = 0,
    task_kind: int | Ints = 0,
    spacing_ns: float = 1_000.0,
    latency_ns: float = 5_000.0,
) -> StepGraph:
    """A launch with one task before each of these calls; a number may repeat, or be the length."""
    count = len(before)
    if not count:
        return graph
    order = np.argsort(before, kind="stable")
    before = before[order].astype(np.int64)
    calls, tasks = graph.calls, graph.tasks
    place = before + np.arange(count)  # of the new calls among all
    old = np.ones(len(calls) + count, np.bool_)
    old[place] = False
    phase = calls.phase[np.minimum(before, len(calls) - 1)] if len(calls) else np.zeros(count)
    new = {
        "kind": CallKind.LAUNCH,
        "gap_ns": _spread(gap_ns, order),
        "call_ns": _spread(call_ns, order),
        "tail_ns": 0.0,
        "phase": phase,
        "row": -1,
        "operator": -1,
        "frames": 0.0,
    }
    merged = {name: _merged(getattr(calls, name), new[name], old) for name in new}
    awaits: list[tuple[int, ...]] = [()] * len(old)
    for number, streams in zip(np.flatnonzero(old).tolist(), calls.awaits, strict=True):
        awaits[number] = streams
    at = np.flatnonzero(old).astype(np.int32)
    call = np.concatenate((at[tasks.call], place.astype(np.int32)))
    rank = np.argsort(call, kind="stable")
    fresh: dict[str, Any] = {
        "stream": _spread(stream, order),
        "dur_ns": _spread(dur_ns, order),
        "spacing_ns": spacing_ns,
        "latency_ns": latency_ns,
        "kind": _spread(task_kind, order),
        "row": -1,
        "after": -1,
        "after_ns": 0.0,
    }
    where = np.empty(len(call), np.int32)
    where[rank] = np.arange(len(call), dtype=np.int32)
    joined = {
        name: np.concatenate(
            (
                getattr(tasks, name),
                np.broadcast_to(np.asarray(value, getattr(tasks, name).dtype), (count,)),
            )
        )[rank]
        for name, value in fresh.items()
    }
    after = joined["after"]
    joined["after"] = np.where(after >= 0, where[np.maximum(after, 0)], -1).astype(np.int32)
    return replace(
        graph,
        calls=Calls(**merged, awaits=tuple(awaits)),
        tasks=Tasks(call=call[rank], **joined),
        streams=max(graph.streams, int(np.max(stream)) + 1),
    )


def reorder(graph: StepGraph, order: Ints) -> StepGraph:
    """The calls in another order, each with its gap and its tasks."""
    calls, tasks = graph.calls, graph.tasks
    moved = {
        name: getattr(calls, name)[order] for name in calls.__struct_fields__ if name != "awaits"
    }
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    call = place[tasks.call]
    rank = np.argsort(call, kind="stable")
    where = np.empty(len(rank), np.int32)
    where[rank] = np.arange(len(rank), dtype=np.int32)
    turned = {name: getattr(tasks, name)[rank] for name in tasks.__struct_fields__}
    after = turned["after"]
    turned["after"] = np.where(after >= 0, where[np.maximum(after, 0)], -1).astype(np.int32)
    # What now runs earlier than what it waited for cannot wait for it.
    turned["after"][turned["after"] >= np.arange(len(rank))] = -1
    turned["call"] = call[rank]
    return replace(
        graph,
        calls=Calls(**moved, awaits=tuple(calls.awaits[i] for i in order.tolist())),
        tasks=Tasks(**turned),
    )


def _spread(value: float | Floats | Ints, order: NDArray[np.intp]) -> Any:
    return value[order] if isinstance(value, np.ndarray) else value


def _merged(values: NDArray[Any], new: Any, old: Flags) -> NDArray[Any]:
    out = np.empty(len(old), values.dtype)
    out[old] = values
    out[~old] = new
    return out


def _some_calls(calls: Calls, keep: Flags) -> Calls:
    columns = {
        name: getattr(calls, name)[keep] for name in calls.__struct_fields__ if name != "awaits"
    }
    awaits = tuple(each for each, kept in zip(calls.awaits, keep.tolist(), strict=True) if kept)
    return Calls(**columns, awaits=awaits)


def _some_tasks(tasks: Tasks, keep: Flags) -> Tasks:
    return Tasks(**{name: getattr(tasks, name)[keep] for name in tasks.__struct_fields__})
