"""Communication put into a step in one pass: launches, the tasks they start, and who waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.graph import CallKind
from stepscope.explain.work import Kind
from stepscope.predict.edit import Selection, insert, remove

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.replay.graph import StepGraph


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
