"""The exchange of gradients that a trace already shows: its buckets, and what sums them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.explain.collective_calls import count_elements, list_calls
from stepscope.explain.collectives import DTYPE_BYTES
from stepscope.explain.rank_steps import measure_pace
from stepscope.explain.strategies import find_strategies
from stepscope.explain.work import Kind, rows_named
from stepscope.predict.buckets import ACCUMULATE, Buckets, places_behind, rows_in_step
from stepscope.predict.transfers import Seen
from stepscope.records.job import KINDS
from stepscope.records.strategies import (
    RankFullySharded,
    RankPipeline,
    RankTensorParallel,
)
from stepscope.records.trace import HostKind
from stepscope.trace.links import distinct, nearest_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.replay.graph import Floats, StepGraph
    from stepscope.predict.step_context import StepContext
    from stepscope.predict.transfers import Transfers
    from stepscope.records.job import CollectiveCalls

    Flags = NDArray[np.bool_]

_REDUCE = "c10d::allreduce_"
_SPREAD_OUT = {
    RankFullySharded: "its parameters are sharded",
    RankTensorParallel: "its layers are split over ranks",
    RankPipeline: "it is a pipeline",
}


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """Data parallelism as the trace shows it; `ranks` is 1 where nobody else takes part."""

    ranks: int
    buckets: Buckets | None  # None: all-reduces whose sizes are not known
    tasks: NDArray[np.intp]  # of the graph, one for each bucket; none where a rank was alone
    seen: Seen | None
    otherwise: str | None = None  # why replicas are not all there is


def split_waiting(
    durations: Floats, buckets: Buckets, now: Transfers | None
) -> tuple[Floats, Floats]:
    """Of traced collectives: what is not their transfer, and their transfer over the one expected,
    where they were quicker."""
    sizes = buckets.size_bytes.astype(np.float64)
    expected = now.expected_ns(sizes) if now else np.zeros(len(sizes))
    moving = np.minimum(durations, expected)
    return durations - moving, moving / np.maximum(expected, 1.0)


def find_traced(context: StepContext, graph: StepGraph) -> Traced | None:
    """None for a step that exchanges nothing."""
    trace, work, steps = context.trace, context.work, context.steps
    calls, row = list_calls(trace, work, steps, context.folder)
    if not len(calls):
        return _alone(context, graph)
    pace = measure_pace(trace, work, steps)
    found = find_strategies(trace, work, calls, row, pace, context.folder)
    otherwise = next((why for s in found if (why := _SPREAD_OUT.get(type(s)))), None)
    mine = _of_backward(context, row) & (calls.kind == KINDS.index("all_reduce"))
    ranks = _group_size(calls, mine) or trace.world_size or 1
    tasks, of = _tasks(context, graph, calls, mine)
    sizes = calls.size_bytes[of]
    buckets = None
    if len(tasks) and (sizes > 0).all():
        made = np.where(row[of] >= 0, trace.host.start_ns[np.maximum(row[of], 0)], 0)
        buckets = Buckets(
            ready=np.maximum.accumulate(places_behind(context, graph, made)),
            size_bytes=sizes,
            tensors=np.zeros(len(tasks), np.int32),
        )
    return Traced(
        ranks=ranks, buckets=buckets, tasks=tasks, seen=_seen(calls, mine, ranks),
        otherwise=otherwise,
    )  # fmt: skip


def _of_backward(context: StepContext, row: NDArray[np.int32]) -> Flags:
    host = context.trace.host
    backward = (host.forward_thread > 0) | rows_named(
        context.trace,
        host,
        host.kind <= HostKind.ANNOTATION,
        lambda name: name.startswith("autograd::engine"),
    )
    found: Flags = nearest_of(host, backward, row) >= 0
    return found


def _group_size(calls: CollectiveCalls, mine: Flags) -> int | None:
    sizes = [calls.groups[group].size for group in distinct(calls.group[mine]).tolist()]
    known = [size for size in sizes if size]
    return max(known, default=None)


def _tasks(
    context: StepContext, graph: StepGraph, calls: CollectiveCalls, mine: Flags
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The graph's tasks that sum gradients, and the call of each, joined by their start."""
    events = context.trace.host if context.on_host else context.trace.device
    tasks = np.flatnonzero((graph.tasks.kind == Kind.COMM) & (graph.tasks.row >= 0))
    wanted = np.flatnonzero(mine)
    if not len(tasks) or not len(wanted):
        return tasks[:0], wanted[:0]
    order = wanted[np.argsort(calls.start_ns[wanted], kind="stable")]
    start = events.start_ns[graph.tasks.row[tasks]]
    place = np.minimum(np.searchsorted(calls.start_ns[order], start), len(order) - 1)
    hit = calls.start_ns[order[place]] == start
    return tasks[hit], order[place[hit]]


def _seen(calls: CollectiveCalls, mine: Flags, ranks: int) -> Seen | None:
    known = mine & (calls.size_bytes > 0)
    if ranks < 2 or not known.any():
        return None
    return Seen(
        ranks=ranks,
        size_bytes=calls.size_bytes[known].astype(np.float64),
        dur_ns=(calls.end_ns - calls.start_ns)[known].astype(np.float64),
    )


def _alone(context: StepContext, graph: StepGraph) -> Traced | None:
    """DDP over one rank: its all-reduces are called, and nothing is sent."""
    host = context.trace.host
    rows = rows_in_step(context, (_REDUCE,))
    rows = rows[_of_backward(context, rows.astype(np.int32))]
    if not len(rows):
        return None
    width = _gradient_width(context)
    sizes = np.array(
        [width * _given_elements(context, code) for code in host.shapes[rows].tolist()], np.int64
    )
    buckets = None
    if (sizes > 0).all():
        buckets = Buckets(
            ready=np.maximum.accumulate(places_behind(context, graph, host.start_ns[rows])),
            size_bytes=sizes,
            tensors=np.zeros(len(rows), np.int32),
        )
    return Traced(ranks=1, buckets=buckets, tasks=np.zeros(0, np.intp), seen=None)


def _gradient_width(context: StepContext) -> int:
    """Bytes of an element; the call's own list of tensors does not tell its type."""
    host, strings = context.trace.host, context.trace.strings
    rows = rows_in_step(context, (ACCUMULATE,))
    rows = rows[host.dtypes[rows] >= 0]
    if not len(rows):
        return 4
    try:
        types: Any = msgspec.json.decode(strings[host.dtypes[rows[0]]])
    except msgspec.DecodeError:
        return 4
    return DTYPE_BYTES.get(str(types[0]).lower(), 4) if types else 4


def _given_elements(context: StepContext, shapes: int) -> int:
    """Of the list of tensors that the call was given; 0 where it was not recorded."""
    if shapes < 0:
        return 0
    try:
        dims: Any = msgspec.json.decode(context.trace.strings[shapes])
    except msgspec.DecodeError:
        return 0
    return count_elements(dims[0] if dims else None)
