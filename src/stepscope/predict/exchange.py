"""The exchange of gradients put into a step: DDP's buckets, or ZeRO's shards.

Collectives run one after the other on a stream of their own. On an accelerator each waits for the
compute launched before it, and the compute behind backward waits for the last; where the CPU is the
device the host itself waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.graph import Phase
from stepscope.explain.replay.schedule import replay
from stepscope.explain.work import Kind
from stepscope.predict.buckets import chain_buckets
from stepscope.predict.edit import Selection, remove, scale_calls, scale_tasks
from stepscope.predict.insert_collectives import InsertedCall, insert_collectives
from stepscope.predict.kernels import FLOOR_NS, copy_ns

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Floats, Ints, StepGraph
    from stepscope.predict.buckets import Buckets
    from stepscope.predict.norm_buffers import NormBuffers
    from stepscope.predict.traced_exchange import TracedExchange
    from stepscope.predict.transfers import TransferTimes
    from stepscope.records.efficiency import Ceilings


class DdpCost(msgspec.Struct, frozen=True, kw_only=True):
    """What DDP itself costs the host: at each tensor, each bucket, and once a step.

    Measured as DDP over one rank against no DDP; docs/scale-out.md has the table.
    """

    step_ns: float
    bucket_ns: float
    tensor_ns: float
    copied_bytes_s: float  # a CPU's, bytes read plus written; a device copies by its own ceiling


COST_ON_CPU = DdpCost(step_ns=450_000, bucket_ns=60_000, tensor_ns=15_000, copied_bytes_s=27e9)
COST_ON_DEVICE = DdpCost(step_ns=300_000, bucket_ns=75_000, tensor_ns=35_000, copied_bytes_s=0.0)


class StepLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step takes collectives: its streams, and what kind of step it is."""

    on_host: bool
    compute: int  # stream; -1 where the host computes
    comm: int
    end_of_backward: int  # call


class ReduceRules(msgspec.Struct, frozen=True, kw_only=True):
    """How gradients are reduced."""

    kind: str  # of collective
    toll: bool  # what DDP does itself is not in the step yet
    ceilings: Ceilings | None
    waiting_ns: float  # what ranks wait for one another besides


def find_layout(graph: StepGraph, ready: Ints, *, on_host: bool) -> StepLayout:
    tasks = graph.tasks
    computing = tasks.kind == Kind.COMPUTE
    busy = np.bincount(tasks.stream[computing], tasks.dur_ns[computing], max(1, graph.streams))
    backward = np.flatnonzero(graph.calls.phase == Phase.BACKWARD)
    last = int(backward.max()) + 1 if len(backward) else 0
    return StepLayout(
        on_host=on_host,
        compute=-1 if on_host else int(busy.argmax()),
        comm=graph.streams,
        end_of_backward=max(last, int(ready.max(initial=0))),
    )


def without_traced(graph: StepGraph, traced: TracedExchange) -> StepGraph:
    """The step with its own exchange taken out; the calls stay."""
    gone = np.zeros(len(graph.tasks), np.bool_)
    gone[traced.tasks] = True
    return remove(graph, Selection(calls=np.zeros(len(graph.calls), np.bool_), tasks=gone))


def retime_traced(graph: StepGraph, traced: TracedExchange, dur_ns: Floats) -> StepGraph:
    """The traced exchange with other durations."""
    durations = graph.tasks.dur_ns.copy()
    durations[traced.tasks] = dur_ns
    return replace(graph, tasks=replace(graph.tasks, dur_ns=durations))


def sum_gradients(
    graph: StepGraph,
    buckets: Buckets,
    transfers: TransferTimes,
    *,
    on_host: bool,
    toll: bool,
    ceilings: Ceilings | None,
    statistics: NormBuffers | None = None,
    waiting_ns: float = 0.0,
) -> StepGraph:
    """One all-reduce for each bucket. `toll`: what DDP does itself is not in the step yet."""
    place = find_layout(graph, buckets.ready, on_host=on_host)
    rules = ReduceRules(kind="all_reduce", toll=toll, ceilings=ceilings, waiting_ns=waiting_ns)
    pieces = _reduce(graph, buckets, transfers, place, rules)
    if toll and statistics:
        pieces += _broadcast(graph, statistics, transfers, place, len(pieces))
    return insert_collectives(graph, pieces, place.compute)


def _reduce(
    graph: StepGraph,
    buckets: Buckets,
    transfers: TransferTimes,
    place: StepLayout,
    rules: ReduceRules,
) -> list[InsertedCall]:
    """Collectives inside backward, and who waits for the last of them."""
    sizes = buckets.size_bytes.astype(np.float64)
    rates = COST_ON_CPU if place.on_host else COST_ON_DEVICE
    host: Floats = np.zeros(len(buckets))
    fill: Floats = np.zeros(len(buckets))
    if rules.toll:
        host = rates.bucket_ns + rates.tensor_ns * buckets.tensors.astype(np.float64)
        fill = _copied_ns(sizes, place, rules.ceilings)
    durations, lost = _in_backward(graph, buckets, transfers, place, rules.kind, host + fill)
    durations = durations + rules.waiting_ns / max(1, len(buckets))
    pieces: list[InsertedCall] = []
    last = -1
    for number, before in enumerate(buckets.ready.tolist()):
        if rules.toll and not place.on_host:
            pieces.append(
                InsertedCall(
                    before=before, stream=place.compute, dur_ns=fill[number], kind=Kind.MEMORY
                )
            )
        last = len(pieces)
        pieces.append(
            InsertedCall(
                before=before,
                stream=place.comm,
                dur_ns=durations[number],
                gap_ns=host[number] + (fill[number] if place.on_host else 0.0),
                call_ns=lost[number],
                behind_compute=True,
            )
        )
    finish = rates.step_ns if rules.toll else 0.0
    back = float(fill.sum())
    return [*pieces, *_wait(place, place.end_of_backward, last, finish, back)]


def _broadcast(
    graph: StepGraph,
    statistics: NormBuffers,
    transfers: TransferTimes,
    place: StepLayout,
    offset: int,
) -> list[InsertedCall]:
    """Before forward, and forward waits for it."""
    rates = COST_ON_CPU if place.on_host else COST_ON_DEVICE
    first = int(np.flatnonzero(graph.calls.phase == Phase.FORWARD).min(initial=len(graph.calls)))
    sizes = np.array(statistics.messages_bytes, np.float64)
    pieces = [
        InsertedCall(before=first, stream=place.comm, dur_ns=dur, gap_ns=rates.bucket_ns)
        for dur in transfers.expected_ns(sizes, "broadcast").tolist()
    ]
    host = rates.tensor_ns * statistics.tensors
    return [*pieces, *_wait(place, first, offset + len(pieces) - 1, host, 0.0)]


def _wait(
    place: StepLayout, before: int, last: int, host_ns: float, device_ns: float
) -> list[InsertedCall]:
    """For the collective `last`; then what it takes to go on."""
    if place.on_host:
        return [
            InsertedCall(before=before, stream=place.comm, host_waits=True),
            InsertedCall(
                before=before, stream=place.comm, gap_ns=host_ns + device_ns, kind=Kind.MEMORY
            ),
        ]
    return [
        InsertedCall(
            before=before,
            stream=place.compute,
            dur_ns=device_ns,
            gap_ns=host_ns,
            kind=Kind.MEMORY,
            after=last if last >= 0 else None,
        )
    ]


def _copied_ns(sizes: Floats, place: StepLayout, ceilings: Ceilings | None) -> Floats:
    """Gradients into their bucket, or back: read once, written once."""
    if place.on_host:
        return 2 * sizes / COST_ON_CPU.copied_bytes_s * 1e9
    if ceilings is None:
        return np.full(len(sizes), FLOOR_NS)
    return copy_ns(2 * sizes, ceilings)


def _in_backward(
    graph: StepGraph,
    buckets: Buckets,
    transfers: TransferTimes,
    place: StepLayout,
    kind: str,
    host_ns: Floats,
) -> tuple[Floats, Floats]:
    """How long each collective lasts, and what the host loses while it does."""
    sizes = buckets.size_bytes.astype(np.float64)
    alone = transfers.expected_ns(sizes, kind)
    if not place.on_host or transfers.contention is None:
        return alone, np.zeros(len(buckets))
    calls = graph.calls
    ended = np.append(0.0, replay(graph).called_ns + calls.call_ns)  # of the call before each
    spent = np.cumsum(host_ns)
    chain = chain_buckets(
        ended[buckets.ready] + spent,
        float(ended[place.end_of_backward] + spent[-1]) if len(spent) else 0.0,
        alone,
        transfers.beside_ns(sizes, kind),
        transfers.contention.lost,
    )
    return chain.dur_ns, chain.lost_ns


def shard(
    graph: StepGraph,
    buckets: Buckets,
    transfers: TransferTimes,
    stage: int,
    *,
    on_host: bool,
    toll: bool,
    ceilings: Ceilings | None,
    waiting_ns: float = 0.0,
) -> StepGraph:
    """ZeRO: gradients scattered in backward, the optimizer's work divided, parameters gathered:
    once behind the optimizer (stages 1 and 2), or before forward and before backward (stage 3)."""
    share = 1.0 / transfers.ranks
    stepping = graph.calls.phase == Phase.OPTIMIZER
    graph = scale_calls(graph, stepping, share)
    graph = scale_tasks(graph, stepping[graph.tasks.call], share)
    place = find_layout(graph, buckets.ready, on_host=on_host)
    rules = ReduceRules(kind="reduce_scatter", toll=toll, ceilings=ceilings, waiting_ns=waiting_ns)
    pieces = _reduce(graph, buckets, transfers, place, rules)
    gathers = transfers.expected_ns(buckets.size_bytes.astype(np.float64), "all_gather")
    lost = transfers.contention.lost if on_host and transfers.contention else 0.0
    if stage < 3:
        pieces += _gather_at_end(len(graph.calls), gathers, place, len(pieces))
    else:
        for starts, order in _blocks(graph, buckets, place):
            pieces += _gather_ahead(starts, gathers[order], place, len(pieces), lost)
    return insert_collectives(graph, pieces, place.compute)


def _gather_at_end(end: int, gathers: Floats, place: StepLayout, offset: int) -> list[InsertedCall]:
    toll = (COST_ON_CPU if place.on_host else COST_ON_DEVICE).bucket_ns
    pieces = [
        InsertedCall(before=end, stream=place.comm, dur_ns=dur, gap_ns=toll, behind_compute=True)
        for dur in gathers.tolist()
    ]
    return [*pieces, *_wait(place, end, offset + len(pieces) - 1, 0.0, 0.0)]


def _blocks(
    graph: StepGraph, buckets: Buckets, place: StepLayout
) -> list[tuple[list[int], list[int]]]:
    """Of forward and of backward: where each bucket's layers begin, and the buckets' order.

    Layers run in forward in the reverse order, each for the same share of the calls.
    """
    first = np.flatnonzero(graph.calls.phase == Phase.BACKWARD).min(initial=place.end_of_backward)
    edges = np.append(first, buckets.ready).astype(float)
    length = max(1.0, place.end_of_backward - first)
    forward = np.flatnonzero(graph.calls.phase == Phase.FORWARD)
    count = len(buckets)
    backwards = ([int(edges[n]) for n in range(count)], list(range(count)))
    if not len(forward):
        return [backwards]
    shares = 1.0 - np.clip((edges[1:] - first) / length, 0.0, 1.0)  # where a block begins
    places = forward[np.minimum((shares * len(forward)).astype(int), len(forward) - 1)]
    order = list(range(count))[::-1]
    return [([int(places[n]) for n in order], order), backwards]


def _gather_ahead(
    starts: list[int], gathers: Floats, place: StepLayout, offset: int, lost: float
) -> list[InsertedCall]:
    """The first gather in the open, every other while the block before it computes."""
    toll = (COST_ON_CPU if place.on_host else COST_ON_DEVICE).bucket_ns
    pieces: list[InsertedCall] = []

    def launch(before: int, dur: float, charge: float) -> int:
        pieces.append(
            InsertedCall(before=before, stream=place.comm, dur_ns=dur, gap_ns=toll, call_ns=charge)
        )
        return offset + len(pieces) - 1

    pending = launch(starts[0], float(gathers[0]), 0.0)
    for number, start in enumerate(starts):
        pieces += _wait(place, start, pending, 0.0, 0.0)
        if number + 1 < len(starts):
            dur = float(gathers[number + 1])
            pending = launch(start, dur, lost * dur)
    return pieces
