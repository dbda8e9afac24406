"""The exchange of gradients that a trace already shows: its buckets, and what sums them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.collective_calls import count_elements
from stepscope.explain.collectives import DTYPE_BYTES
from stepscope.explain.work import Kind, rows_named
from stepscope.predict.buckets import Buckets, calls_after, rows_in_step
from stepscope.predict.by_text import by_text
from stepscope.predict.parameters import ACCUMULATE
from stepscope.predict.transfers import TracedAllReduces
from stepscope.records.job import KINDS
from stepscope.records.strategies import RankFullySharded, RankPipeline, RankTensorParallel
from stepscope.records.trace import HostKind
from stepscope.trace.links import distinct, nearest_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.replay.graph import Flags, Floats, StepGraph
    from stepscope.predict.step_context import StepContext
    from stepscope.predict.transfers import TransferTimes
    from stepscope.records.job import CollectiveCalls, Group


_REDUCE = "c10d::allreduce_"
_NOT_REPLICAS = {
    RankFullySharded: "its parameters are sharded",
    RankTensorParallel: "its layers are split over ranks",
    RankPipeline: "it is a pipeline",
}


class TracedExchange(msgspec.Struct, frozen=True, kw_only=True):
    """Data parallelism as the trace shows it; `ranks` is 1 if nobody else takes part."""

    ranks: int
    buckets: Buckets | None  # None: the sizes of the all-reduces are not known
    tasks: NDArray[np.intp]  # of the graph, one per bucket; none if a rank was alone
    all_reduces: TracedAllReduces | None
    not_replicas: str | None = None  # why the ranks are more than replicas
    members: tuple[int, ...] = ()  # the ranks of the group; empty if the trace does not list them
    # What the link carries while each bucket is on its way: more than the bucket if several share
    # it. None if no two overlap.
    carried_bytes: Floats | None = None

    @property
    def sizes(self) -> Floats:
        """By which transfers are priced."""
        if self.carried_bytes is not None:
            return self.carried_bytes
        return self.buckets.size_bytes.astype(np.float64) if self.buckets else np.zeros(0)


def split_waiting(
    durations: Floats, sizes: Floats, now: TransferTimes | None
) -> tuple[Floats, Floats]:
    """Split traced collectives of these sizes into waiting and transfer.

    Returns each one's waiting, and its transfer over the expected one: less than 1 if it was
    faster.
    """
    expected = now.expected_ns(sizes) if now else np.zeros(len(sizes))
    transfer = np.minimum(durations, expected)
    return durations - transfer, transfer / np.maximum(expected, 1.0)


def find_traced_exchange(context: StepContext, graph: StepGraph) -> TracedExchange | None:
    """None for a step that exchanges nothing."""
    trace = context.trace
    calls, row = context.analysis.collective_calls
    if not len(calls):
        return _find_single_rank(context, graph)
    reasons = (_NOT_REPLICAS.get(type(strategy)) for strategy in context.analysis.strategies)
    summing = _is_in_backward(context, row) & (calls.kind == KINDS.index("all_reduce"))
    group = _largest_group(calls, summing)
    ranks = (group.size if group else None) or trace.world_size or 1
    tasks, numbers = _find_tasks(context, graph, calls, summing)
    called_ns = np.where(row[numbers] >= 0, trace.host.start_ns[np.maximum(row[numbers], 0)], 0)
    return TracedExchange(
        ranks=ranks,
        buckets=_find_buckets(context, graph, called_ns, calls.size_bytes[numbers]),
        tasks=tasks,
        all_reduces=_find_all_reduces(calls, summing, ranks),
        not_replicas=next((reason for reason in reasons if reason), None),
        members=group.ranks if group else (),
        carried_bytes=carried_bytes(calls, numbers),
    )


def _find_buckets(
    context: StepContext, graph: StepGraph, called_ns: NDArray[np.int64], sizes: NDArray[np.int64]
) -> Buckets | None:
    if not len(sizes) or (sizes <= 0).any():
        return None
    return Buckets(
        ready=np.maximum.accumulate(calls_after(context, graph, called_ns)),
        size_bytes=sizes,
        tensors=np.zeros(len(sizes), np.int32),
    )


def _is_in_backward(context: StepContext, row: NDArray[np.int32]) -> Flags:
    host = context.trace.host
    backward = (host.forward_thread > 0) | rows_named(
        context.trace,
        host,
        host.kind <= HostKind.ANNOTATION,
        lambda name: name.startswith("autograd::engine"),
    )
    inside: Flags = nearest_of(host, backward, row) >= 0
    return inside


def _largest_group(calls: CollectiveCalls, chosen: Flags) -> Group | None:
    groups = [calls.groups[group] for group in distinct(calls.group[chosen]).tolist()]
    return max((group for group in groups if group.size), key=_size_of, default=None)


def _size_of(group: Group) -> int:
    return group.size or 0


def _find_tasks(
    context: StepContext, graph: StepGraph, calls: CollectiveCalls, summing: Flags
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The graph's tasks that sum gradients and the call of each, joined by their start."""
    events = context.trace.host if context.on_host else context.trace.device
    tasks = np.flatnonzero((graph.tasks.kind == Kind.COMM) & (graph.tasks.row >= 0))
    wanted = np.flatnonzero(summing)
    if not len(tasks) or not len(wanted):
        return tasks[:0], wanted[:0]
    order = wanted[np.argsort(calls.start_ns[wanted], kind="stable")]
    start = events.start_ns[graph.tasks.row[tasks]]
    place = np.minimum(np.searchsorted(calls.start_ns[order], start), len(order) - 1)
    hit = calls.start_ns[order[place]] == start
    return tasks[hit], order[place[hit]]


def _find_all_reduces(
    calls: CollectiveCalls, summing: Flags, ranks: int
) -> TracedAllReduces | None:
    known = summing & (calls.size_bytes > 0)
    if ranks < 2 or not known.any():
        return None
    return list_all_reduces(calls, known, ranks)


def list_all_reduces(calls: CollectiveCalls, chosen: Flags, ranks: int) -> TracedAllReduces:
    """Calls that overlap share the link: together they count as one of all their bytes."""
    numbers = np.flatnonzero(chosen)
    numbers = numbers[np.argsort(calls.start_ns[numbers], kind="stable")]
    start, end = calls.start_ns[numbers], calls.end_ns[numbers]
    together = _overlapping(start, end)
    first = np.flatnonzero(np.diff(together, prepend=-1))
    return TracedAllReduces(
        ranks=ranks,
        size_bytes=np.bincount(together, calls.size_bytes[numbers]).astype(np.float64),
        dur_ns=(np.maximum.reduceat(end, first) - start[first]).astype(np.float64),
    )


def _overlapping(start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """A number for each run of calls, in order of their starts, in which each overlaps another."""
    reach = np.maximum.accumulate(end_ns)
    alone = np.append(True, start_ns[1:] >= reach[:-1])
    numbers: NDArray[np.int64] = np.cumsum(alone) - 1
    return numbers


def carried_bytes(calls: CollectiveCalls, numbers: NDArray[np.intp]) -> Floats | None:
    """A call's share of the time of all that overlap it, times all their bytes."""
    if len(numbers) < 2 or (calls.size_bytes[numbers] <= 0).any():
        return None
    order = np.argsort(calls.start_ns[numbers], kind="stable")
    start, end = calls.start_ns[numbers[order]], calls.end_ns[numbers[order]]
    together = _overlapping(start, end)
    if together[-1] == len(numbers) - 1:
        return None
    first = np.flatnonzero(np.diff(together, prepend=-1))
    lasts = np.maximum.reduceat(end, first) - start[first]
    total = np.bincount(together, calls.size_bytes[numbers[order]])
    carried = np.zeros(len(numbers))
    carried[order] = total[together] * (end - start) / np.maximum(lasts[together], 1)
    return carried


def _find_single_rank(context: StepContext, graph: StepGraph) -> TracedExchange | None:
    """DDP over one rank: all-reduces are called, but nothing is sent."""
    host = context.trace.host
    rows = rows_in_step(context, (_REDUCE,))
    rows = rows[_is_in_backward(context, rows.astype(np.int32))]
    if not len(rows):
        return None
    width = _gradient_width(context)
    elements = by_text(context.trace, host.shapes, rows, _given_elements, 0.0)
    sizes = width * elements.astype(np.int64)
    buckets = _find_buckets(context, graph, host.start_ns[rows], sizes)
    return TracedExchange(ranks=1, buckets=buckets, tasks=np.zeros(0, np.intp), all_reduces=None)


def _gradient_width(context: StepContext) -> int:
    """Bytes per element; the call's own list of tensors does not give its type."""
    host, strings = context.trace.host, context.trace.strings
    rows = rows_in_step(context, (ACCUMULATE,))
    rows = rows[host.dtypes[rows] >= 0]
    if not len(rows):
        return 4
    types = msgspec.json.decode(strings[host.dtypes[rows[0]]])
    return DTYPE_BYTES.get(types[0].lower(), 4) if types else 4


def _given_elements(shapes: str) -> float:
    """Elements of the call's list of tensors."""
    dims = msgspec.json.decode(shapes)
    return float(count_elements(dims[0] if dims else None))
