"""Find data parallelism in the traced step: gradients in DDP's buckets, batch-norm buffers,
the traced exchange, and the slowest worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.predict.step_context import ACCUMULATE, StepContext, in_step
from stepscope.records.dtypes import LOWER_CASE_BYTES
from stepscope.records.job import KINDS, CollectiveCalls
from stepscope.records.normal import median
from stepscope.records.strategies import RankFullySharded, RankPipeline, RankTensorParallel
from stepscope.records.trace import HostKind
from stepscope.step.call_tree import by_text
from stepscope.step.collectives import count_elements
from stepscope.step.correct import scale_host
from stepscope.step.edit import scale_tasks
from stepscope.step.graph import Phase, StepGraph
from stepscope.step.work import Kind, rows_named
from stepscope.trace.links import distinct, nearest_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.predict.collective_times import TracedAllReduces, TransferTimes
    from stepscope.step.graph import Flags, Floats, Ints

    Sizes = NDArray[np.int64]

# The exchange of gradients that a trace already shows: its buckets, and what sums them.

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
    groups = [calls.groups[place] for place in distinct(calls.group[summing]).tolist()]
    sized = (group for group in groups if group.size)
    group = max(sized, key=lambda group: group.size or 0, default=None)
    ranks = (group.size if group else None) or trace.world_size or 1
    known = summing & (calls.size_bytes > 0)
    tasks, numbers = _find_tasks(context, graph, calls, summing)
    called_ns = np.where(row[numbers] >= 0, trace.host.start_ns[np.maximum(row[numbers], 0)], 0)
    return TracedExchange(
        ranks=ranks,
        buckets=_find_buckets(context, graph, called_ns, calls.size_bytes[numbers]),
        tasks=tasks,
        all_reduces=list_all_reduces(calls, known, ranks) if ranks > 1 and known.any() else None,
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


def list_all_reduces(calls: CollectiveCalls, chosen: Flags, ranks: int) -> TracedAllReduces:
    """Calls that overlap share the link: together they count as one of all their bytes."""
    from stepscope.predict.collective_times import TracedAllReduces

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
    width = 4  # bytes of an element; the call's own list of tensors does not give its type
    accumulated = rows_in_step(context, (ACCUMULATE,))
    accumulated = accumulated[host.dtypes[accumulated] >= 0]
    if len(accumulated):
        types = msgspec.json.decode(context.trace.strings[host.dtypes[accumulated[0]]])
        width = LOWER_CASE_BYTES.get(types[0].lower(), 4) if types else 4

    def given_elements(shapes: str) -> float:
        """Elements of the call's list of tensors."""
        dims = msgspec.json.decode(shapes)
        return float(count_elements(dims[0] if dims else None))

    elements = by_text(context.trace, host.shapes, rows, given_elements, 0.0)
    sizes = width * elements.astype(np.int64)
    buckets = _find_buckets(context, graph, host.start_ns[rows], sizes)
    return TracedExchange(ranks=1, buckets=buckets, tasks=np.zeros(0, np.intp), all_reduces=None)


# Gradients become ready in backward, fill DDP's buckets, and are summed while backward runs.
#
# DDP puts gradients into buckets in the order in which they became ready (its buckets are rebuilt
# after the first step) and closes a bucket when it holds its limit or more. Buckets are summed one
# after the other, each when its last gradient is there; the optimizer waits for the last.

CAP_BYTES = 25 << 20
FIRST_BYTES = 1 << 20  # DDP's first bucket, unless the script sets a limit
_PASSES = 100


class Gradients(msgspec.Struct, frozen=True, kw_only=True):
    """In the order in which they become ready."""

    ready: Ints  # the next call of the graph
    size_bytes: Sizes
    dtype: Ints  # a code; buckets hold one type

    def __len__(self) -> int:
        return len(self.ready)


class Buckets(msgspec.Struct, frozen=True, kw_only=True):
    """In the order in which they are summed."""

    ready: Ints  # the next call after the last gradient
    size_bytes: Sizes
    tensors: Ints

    def __len__(self) -> int:
        return len(self.ready)


def rows_in_step(context: StepContext, names: tuple[str, ...]) -> NDArray[np.intp]:
    """Operators of the step with these names, in order of their start."""
    host = context.trace.host
    among = (host.kind == HostKind.OPERATOR) & in_step(context)
    rows = np.flatnonzero(rows_named(context.trace, host, among, lambda name: name in names))
    return rows[np.argsort(host.start_ns[rows], kind="stable")]


def calls_after(context: StepContext, graph: StepGraph, times_ns: NDArray[np.int64]) -> Ints:
    """For each host time in backward: the call of the graph after the last one begun by then.

    If what-ifs have repeated calls, the last pass counts.
    """
    calls = graph.calls
    traced = np.flatnonzero(calls.row >= 0)
    if not len(traced):
        return np.zeros(len(times_ns), np.int32)
    backward = traced[calls.phase[traced] == Phase.BACKWARD]
    known = backward if len(backward) else traced
    start = context.trace.host.start_ns[calls.row[known]]
    order = np.argsort(start, kind="stable")
    reach = np.maximum.accumulate(known[order])
    place = np.searchsorted(start[order], times_ns, side="right") - 1
    return np.where(place >= 0, reach[np.maximum(place, 0)] + 1, known.min()).astype(np.int32)


def find_gradients(context: StepContext, graph: StepGraph) -> Gradients | None:
    """Read from backward's accumulation of gradients; None without it or without shapes."""
    host = context.trace.host
    rows = rows_in_step(context, (ACCUMULATE,))
    if not len(rows) or (host.shapes[rows] < 0).any():
        return None
    ready = calls_after(context, graph, host.start_ns[rows] + host.dur_ns[rows])
    # Micro-batches bring the same gradients after each forward; only the last ones are summed.
    forward = np.append(0, np.cumsum(graph.calls.phase == Phase.FORWARD))[ready]
    edges = np.flatnonzero(np.diff(forward)) + 1
    passes = np.split(host.shapes[rows], edges)
    if len(edges) and all(np.array_equal(one, passes[-1]) for one in passes):
        rows, ready = rows[edges[-1] :], ready[edges[-1] :]
    size, dtype = _sizes(context, rows)
    if (size <= 0).all():
        return None
    return Gradients(ready=np.maximum.accumulate(ready), size_bytes=size, dtype=dtype)


def _sizes(context: StepContext, rows: NDArray[np.intp]) -> tuple[Sizes, Ints]:
    """Bytes and type of each gradient; each distinct pair of shapes and types is read once."""
    host, strings = context.trace.host, context.trace.strings
    pairs = np.stack((host.shapes[rows], host.dtypes[rows]), axis=1)
    distinct_pairs, place = np.unique(pairs, axis=0, return_inverse=True)
    tensors = [_tensor_bytes(strings, *pair) for pair in distinct_pairs.tolist()]
    place = place.reshape(-1)
    names = sorted({name for _, name in tensors})
    sizes = np.array([size for size, _ in tensors], np.int64)[place]
    codes = np.array([names.index(name) for _, name in tensors], np.int32)[place]
    return sizes, codes


def _tensor_bytes(strings: tuple[str, ...], shapes: int, dtypes: int) -> tuple[int, str]:
    """Bytes and type of the first input; four bytes per element if its type was not recorded."""
    dims = msgspec.json.decode(strings[shapes])
    names = msgspec.json.decode(strings[dtypes]) if dtypes >= 0 else []
    name = names[0] if names else ""
    if not dims or (dims[0] and isinstance(dims[0][0], list)):  # nothing, or a list of tensors
        return 0, name
    return math.prod(dims[0]) * LOWER_CASE_BYTES.get(name.lower(), 4), name


def fill_buckets(
    gradients: Gradients, cap_bytes: int = CAP_BYTES, first_bytes: int | None = None
) -> Buckets:
    """Fill buckets as torch's Reducer does: a bucket of one type closes once it holds its limit."""
    first = min(FIRST_BYTES, cap_bytes) if first_bytes is None else first_bytes
    limit = dict.fromkeys(distinct(gradients.dtype).tolist(), first)
    held: dict[int, list[int]] = {code: [] for code in limit}
    filled = dict.fromkeys(limit, 0)
    closed: list[list[int]] = []
    pairs = zip(gradients.size_bytes.tolist(), gradients.dtype.tolist(), strict=True)
    for number, (size, code) in enumerate(pairs):
        held[code].append(number)
        filled[code] += size
        if filled[code] >= limit[code]:
            closed.append(held[code])
            held[code], filled[code], limit[code] = [], 0, cap_bytes
    closed += [rest for rest in held.values() if rest]
    ready = np.array([gradients.ready[members].max() for members in closed], np.int32)
    return Buckets(
        ready=np.maximum.accumulate(ready),
        size_bytes=np.array([gradients.size_bytes[members].sum() for members in closed], np.int64),
        tensors=np.array([len(members) for members in closed], np.int32),
    )


def chain_buckets(
    ready_ns: Floats, compute_end_ns: float, alone_ns: Floats, contended_ns: Floats, lost: float
) -> tuple[Floats, Floats]:
    """Run buckets one after the other: how long each takes, and what compute loses to it.

    Each waits for its gradients. While compute runs, a collective takes `contended_ns` and compute
    loses `lost` of `alone_ns`. After compute has ended, the rest of the collective runs at its own
    speed. What compute loses delays everything that follows, so this repeats until it settles.
    """
    guess = lost_ns = np.zeros(len(ready_ns))
    dur_ns = alone_ns.copy()
    for _ in range(_PASSES):
        end, spent = 0.0, 0.0
        compute_end = compute_end_ns + float(guess.sum())
        lost_ns = np.zeros(len(ready_ns))
        for number in range(len(ready_ns)):
            start = max(float(ready_ns[number]) + spent, end)
            room = max(0.0, compute_end - start)
            share = min(1.0, room / contended_ns[number]) if contended_ns[number] > 0 else 1.0
            dur_ns[number] = share * contended_ns[number] + (1 - share) * alone_ns[number]
            lost_ns[number] = lost * alone_ns[number] * share
            end = start + dur_ns[number]
            spent += lost_ns[number]
        if np.abs(lost_ns - guess).max(initial=0.0) < 1.0:
            break
        guess = (guess + lost_ns) / 2
    return dur_ns, lost_ns


# Running statistics of batch norms, which DDP sends from rank 0 before every forward.

_NORM = "aten::batch_norm"
_MEAN = 3  # input, weight, bias, running mean, running variance


class NormBuffers(msgspec.Struct, frozen=True, kw_only=True):
    """Two fp32 vectors and a counter per batch norm."""

    norms: int
    size_bytes: int

    @property
    def tensors(self) -> int:
        return 3 * self.norms

    @property
    def messages_bytes(self) -> tuple[int, int]:
        """Two: DDP flattens all tensors of one type into one message."""
        return self.size_bytes, 8 * self.norms


def find_norm_buffers(context: StepContext) -> NormBuffers | None:
    """None for a step without batch norms that keep statistics."""
    rows = rows_in_step(context, (_NORM,))

    def count_channels(shapes: str) -> float:
        mean = msgspec.json.decode(shapes)[_MEAN : _MEAN + 1]
        return float(mean[0][0]) if mean and len(mean[0]) == 1 else 0.0

    channels = by_text(context.trace, context.trace.host.shapes, rows, count_channels, 0.0)
    norms = int(np.count_nonzero(channels))
    return NormBuffers(norms=norms, size_bytes=8 * int(channels.sum())) if norms else None


# The slowest of several workers: all of them wait for it.

ENOUGH_STEPS = 5  # to say how much they differ
_LONG_STEP = 3.0  # medians: an evaluation or a checkpoint, long on every rank at once


def expected_maximum(values: Sequence[float], count: float) -> float:
    """Of `count` values drawn with replacement. Half a draw (0.5) undoes a maximum of two."""
    ordered = np.sort(np.asarray(values, np.float64))
    reach = (np.arange(len(ordered) + 1) / len(ordered)) ** count
    return float((ordered * np.diff(reach)).sum())


def find_straggling(context: StepContext, ranks: int, before: int) -> float:
    """The slowest worker's step over the present one; 1 if too few steps are known.

    If the ranks of a job are known, each rank's own time is drawn. Steps alone are already those of
    the slowest rank.
    """
    steps = own_steps(context)
    if len(steps) < ENOUGH_STEPS or ranks == before:
        return 1.0
    draws = before if _knows_ranks(context) else 1
    return expected_maximum(steps, ranks * draws / before) / expected_maximum(steps, draws)


def own_steps(context: StepContext) -> list[float]:
    """Measured steps, without those that are long on every rank at once."""
    steps = np.array(context.steps_ns, np.float64)
    if _knows_ranks(context) and context.job is not None:
        own = context.job.own_ns
        steps = own[(own > 0).all(axis=1)].reshape(-1).astype(np.float64)
    if not len(steps):
        return []
    return [float(ns) for ns in steps[steps <= _LONG_STEP * median(steps)].tolist()]


def _knows_ranks(context: StepContext) -> bool:
    return context.job is not None and len(context.job.ranks) > 1


def slow_down(graph: StepGraph, factor: float) -> StepGraph:
    """Everything that a worker does by itself takes `factor` times as long."""
    if factor == 1.0:
        return graph
    return scale_tasks(scale_host(graph, factor), graph.tasks.kind != Kind.COMM, factor)
