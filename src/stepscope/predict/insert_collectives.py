"""Communication put into a step: launches, the tasks they start, and who waits for them.

One pass for all of it: pieces name the call they come before, and one another by their number.
"""

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
    """A call with one task; `host_waits` is a call that waits for the stream instead."""

    before: int  # this call of the graph, or its length
    stream: int
    dur_ns: float = 0.0
    gap_ns: float = 0.0
    call_ns: float = 0.0
    kind: Kind = Kind.COMM
    after: int | None = None  # the number of a piece that must have ended
    behind_compute: bool = False  # and the compute launched before it
    host_waits: bool = False


def insert_collectives(
    graph: StepGraph, pieces: Sequence[InsertedCall], compute_stream: int
) -> StepGraph:
    """Pieces before the same call stay in their order. A piece can wait for an earlier one only."""
    if not pieces:
        return graph
    count = len(pieces)
    before = np.array([piece.before for piece in pieces], np.int32)
    order = np.argsort(before, kind="stable")
    place = np.empty(count, np.int32)  # of each piece's call in the new graph
    place[order] = before[order] + np.arange(count, dtype=np.int32)
    new = insert(
        graph,
        before,
        gap_ns=np.array([piece.gap_ns for piece in pieces]),
        call_ns=np.array([piece.call_ns for piece in pieces]),
        dur_ns=np.array([piece.dur_ns for piece in pieces]),
        stream=np.array([piece.stream for piece in pieces], np.int32),
        task_kind=np.array([piece.kind for piece in pieces], np.int32),
        spacing_ns=0.0,
        latency_ns=0.0,
    )
    task = np.searchsorted(new.tasks.call, place).astype(np.int32)
    after = new.tasks.after.copy()
    computing = np.flatnonzero(new.tasks.stream == compute_stream)
    for number, piece in enumerate(pieces):
        if piece.after is not None:
            after[task[number]] = task[piece.after]
        elif piece.behind_compute:
            earlier = int(np.searchsorted(computing, task[number])) - 1
            after[task[number]] = computing[earlier] if earlier >= 0 else -1
    new = replace(new, tasks=replace(new.tasks, after=after))
    return _with_host_waits(new, pieces, place, task)


def _with_host_waits(
    graph: StepGraph, pieces: Sequence[InsertedCall], place: np.ndarray, task: np.ndarray
) -> StepGraph:
    waiting = [number for number, piece in enumerate(pieces) if piece.host_waits]
    if not waiting:
        return graph
    gone = np.zeros(len(graph.tasks), np.bool_)
    gone[task[waiting]] = True
    none = np.zeros(len(graph.calls), np.bool_)
    graph = remove(graph, Selection(calls=none, tasks=gone))
    kind, awaits = graph.calls.kind.copy(), list(graph.calls.awaits)
    for number in waiting:
        kind[place[number]] = CallKind.WAIT
        awaits[place[number]] = (pieces[number].stream,)
    return replace(graph, calls=replace(graph.calls, kind=kind, awaits=tuple(awaits)))
