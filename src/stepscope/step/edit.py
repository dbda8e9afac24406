"""Change a step's graph: select, scale, insert, remove, reorder, put collectives in.

What-ifs are made of these; every function returns a new graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from stepscope.records.trace import Trace
from stepscope.step.call_tree import by_text
from stepscope.step.graph import CallKind, Calls, Flags, Floats, Ints, StepGraph, Tasks
from stepscope.step.work import Kind

# Every function returns a new graph; the one it was given stays as it is.


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    calls: Flags
    tasks: Flags


def select(
    graph: StepGraph, trace: Trace, matches: Callable[[str], object], *, phase: int | None = None
) -> Selection:
    """Tasks whose kernel or outermost operator has a matching name, and the calls behind them.

    A call is selected if its operator matches or all of its tasks are selected.
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


def _named(trace: Trace, names: Ints, rows: Ints, matches: Callable[[str], object]) -> Flags:
    return by_text(trace, names, rows, lambda name: bool(matches(name)), False)


def scale_tasks(graph: StepGraph, tasks: Flags, factor: float | Floats) -> StepGraph:
    """Selected tasks take `factor` times as long."""
    scaled = np.where(tasks, graph.tasks.dur_ns * factor, graph.tasks.dur_ns)
    return replace(graph, tasks=replace(graph.tasks, dur_ns=scaled))


def scale_calls(graph: StepGraph, calls: Flags, factor: float | Floats) -> StepGraph:
    """The host takes `factor` times as long for selected calls and the gaps before them."""
    times = {"gap_ns": graph.calls.gap_ns, "call_ns": graph.calls.call_ns}
    scaled = {name: np.where(calls, time * factor, time) for name, time in times.items()}
    return replace(graph, calls=replace(graph.calls, **scaled))


def remove(graph: StepGraph, chosen: Selection, *, with_gaps: bool = True) -> StepGraph:
    """Remove calls and tasks, and with `with_gaps` the host's time before those calls.

    A task that waited for a removed one no longer waits. A call that lost only some of its tasks
    stays.
    """
    calls, tasks = graph.calls, graph.tasks
    keep_task = ~(chosen.tasks | chosen.calls[tasks.call])
    keep_call = ~chosen.calls
    gaps = calls.gap_ns if with_gaps else _pass_on_gaps(calls, keep_call)
    left_calls = replace(take_calls(calls, np.flatnonzero(keep_call)), gap_ns=gaps[keep_call])
    number = np.cumsum(keep_call, dtype=np.int32) - 1
    task_number = np.where(keep_task, np.cumsum(keep_task, dtype=np.int32) - 1, -1)
    left_tasks = take_tasks(tasks, np.flatnonzero(keep_task))
    waited = left_tasks.after
    after = np.where(waited >= 0, task_number[np.maximum(waited, 0)], -1).astype(np.int32)
    return replace(
        graph,
        calls=left_calls,
        tasks=replace(left_tasks, call=number[left_tasks.call], after=after),
    )


def _pass_on_gaps(calls: Calls, keep: Flags) -> Floats:
    """The gaps of removed calls go to the next call that stays."""
    next_kept: NDArray[np.int64] = np.cumsum(keep) - keep
    removed = np.where(keep, 0.0, calls.gap_ns)
    summed = np.bincount(next_kept, removed, minlength=len(calls) + 1)
    gaps = calls.gap_ns.copy()
    kept = np.flatnonzero(keep)
    gaps[kept] += summed[: len(kept)]
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
    awaits: Sequence[tuple[int, ...]] = (),
    tail_ns: float | Floats = 0.0,
) -> StepGraph:
    """Add a launch with one task before each of these calls, or a wait where it `awaits` streams.

    A call may repeat, and the number of calls means the end.
    """
    count = len(before)
    if not count:
        return graph
    order = np.argsort(before, kind="stable")
    before = before[order].astype(np.int64)
    streams_of = [awaits[at] for at in order.tolist()] if awaits else [()] * count
    launches = np.array([not streams for streams in streams_of])
    calls, tasks = graph.calls, graph.tasks
    place = before + np.arange(count)  # of the new calls among all
    old = np.ones(len(calls) + count, np.bool_)
    old[place] = False
    phase = calls.phase[np.minimum(before, len(calls) - 1)] if len(calls) else np.zeros(count)
    new = {
        "kind": np.where(launches, CallKind.LAUNCH, CallKind.WAIT),
        "gap_ns": _reordered(gap_ns, order),
        "call_ns": _reordered(call_ns, order),
        "tail_ns": _reordered(tail_ns, order),
        "phase": phase,
        "row": -1,
        "operator": -1,
        "frames": 0.0,
    }
    merged = {name: _merge(getattr(calls, name), new[name], old) for name in new}
    moved_to = np.flatnonzero(old).astype(np.int32)
    all_awaits: list[tuple[int, ...]] = [()] * len(old)
    for numbers, listed in ((moved_to, calls.awaits), (place, streams_of)):
        for number, streams in zip(numbers.tolist(), listed, strict=True):
            all_awaits[number] = streams
    launched = order[launches]  # of the new calls, those that have a task
    call = np.concatenate((moved_to[tasks.call], place[launches].astype(np.int32)))
    rank = np.argsort(call, kind="stable")
    new_tasks: dict[str, Any] = {
        "stream": _reordered(stream, launched),
        "dur_ns": _reordered(dur_ns, launched),
        "spacing_ns": spacing_ns,
        "latency_ns": latency_ns,
        "kind": _reordered(task_kind, launched),
        "row": -1,
        "after": -1,
        "after_ns": 0.0,
    }
    where = np.empty(len(call), np.int32)
    where[rank] = np.arange(len(call), dtype=np.int32)
    is_old = np.arange(len(call)) < len(tasks)
    joined = {
        name: _merge(getattr(tasks, name), value, is_old)[rank] for name, value in new_tasks.items()
    }
    after = joined["after"]
    joined["after"] = np.where(after >= 0, where[np.maximum(after, 0)], -1).astype(np.int32)
    return replace(
        graph,
        calls=Calls(**merged, awaits=tuple(all_awaits)),
        tasks=Tasks(call=call[rank], **joined),
        streams=max(graph.streams, int(np.max(stream)) + 1),
    )


def reorder(graph: StepGraph, order: Ints) -> StepGraph:
    """The calls in another order, each with its gap and its tasks."""
    tasks = graph.tasks
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    call = place[tasks.call]
    rank = np.argsort(call, kind="stable")
    where = np.empty(len(rank), np.int32)
    where[rank] = np.arange(len(rank), dtype=np.int32)
    moved = take_tasks(tasks, rank)
    after = np.where(moved.after >= 0, where[np.maximum(moved.after, 0)], -1).astype(np.int32)
    # A task that now runs before the one it waited for cannot wait for it.
    after[after >= np.arange(len(rank))] = -1
    return replace(
        graph,
        calls=take_calls(graph.calls, order),
        tasks=replace(moved, call=call[rank], after=after),
    )


def _reordered(value: float | Floats | Ints, order: NDArray[np.intp]) -> Any:
    return value[order] if isinstance(value, np.ndarray) else value


def _merge(values: NDArray[Any], new: Any, old: Flags) -> NDArray[Any]:
    merged = np.empty(len(old), values.dtype)
    merged[old] = values
    merged[~old] = new
    return merged


def take_calls(calls: Calls, chosen: NDArray[np.integer[Any]]) -> Calls:
    """These calls in this order; a call may repeat."""
    columns = {
        name: getattr(calls, name)[chosen] for name in calls.__struct_fields__ if name != "awaits"
    }
    return Calls(**columns, awaits=tuple(calls.awaits[i] for i in chosen.tolist()))


def take_tasks(tasks: Tasks, chosen: NDArray[np.integer[Any]]) -> Tasks:
    """These tasks in this order; a task may repeat."""
    return Tasks(**{name: getattr(tasks, name)[chosen] for name in tasks.__struct_fields__})


# Communication put into a step in one pass: launches, the tasks they start, and who waits.


class InsertedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call with one task; with `host_waits`, a call that waits for the stream instead."""

    before: int  # this call of the graph, or its length
    stream: int
    dur_ns: float = 0.0
    gap_ns: float = 0.0
    call_ns: float = 0.0
    kind: Kind = Kind.COMM
    after: int | None = None  # the number of an inserted call whose task must have ended
    after_compute: bool = False  # the compute launched before it must have ended
    host_waits: bool = False


def insert_collectives(
    graph: StepGraph, inserted: Sequence[InsertedCall], compute_stream: int
) -> StepGraph:
    """Calls before the same call keep their order. A call can only wait for an earlier one."""
    if not inserted:
        return graph
    count = len(inserted)
    before = np.array([call.before for call in inserted], np.int32)
    order = np.argsort(before, kind="stable")
    place = np.empty(count, np.int32)  # of each inserted call in the new graph
    place[order] = before[order] + np.arange(count, dtype=np.int32)
    new = insert(
        graph,
        before,
        gap_ns=np.array([call.gap_ns for call in inserted]),
        call_ns=np.array([call.call_ns for call in inserted]),
        dur_ns=np.array([call.dur_ns for call in inserted]),
        stream=np.array([call.stream for call in inserted], np.int32),
        task_kind=np.array([call.kind for call in inserted], np.int32),
        spacing_ns=0.0,
        latency_ns=0.0,
    )
    task = np.searchsorted(new.tasks.call, place).astype(np.int32)
    after = new.tasks.after.copy()
    computing = np.flatnonzero(new.tasks.stream == compute_stream)
    for number, call in enumerate(inserted):
        if call.after is not None:
            after[task[number]] = task[call.after]
        elif call.after_compute:
            earlier = int(np.searchsorted(computing, task[number])) - 1
            after[task[number]] = computing[earlier] if earlier >= 0 else -1
    new = replace(new, tasks=replace(new.tasks, after=after))
    return _add_host_waits(new, inserted, place, task)


def _add_host_waits(
    graph: StepGraph, inserted: Sequence[InsertedCall], place: np.ndarray, task: np.ndarray
) -> StepGraph:
    waiting = [number for number, call in enumerate(inserted) if call.host_waits]
    if not waiting:
        return graph
    tasks = np.zeros(len(graph.tasks), np.bool_)
    tasks[task[waiting]] = True
    no_calls = np.zeros(len(graph.calls), np.bool_)
    graph = remove(graph, Selection(calls=no_calls, tasks=tasks))
    kind, awaits = graph.calls.kind.copy(), list(graph.calls.awaits)
    for number in waiting:
        kind[place[number]] = CallKind.WAIT
        awaits[place[number]] = (inserted[number].stream,)
    return replace(graph, calls=replace(graph.calls, kind=kind, awaits=tuple(awaits)))
