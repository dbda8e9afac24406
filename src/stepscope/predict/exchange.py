"""The exchange of gradients put into a step: DDP's buckets, or ZeRO's shards.

Collectives run one after the other on a stream of their own. On an accelerator each waits for the
compute launched before it, and the compute after backward waits for the last one. If the CPU is the
device, the host itself waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    """What DDP itself costs the host: per step, per bucket and per tensor.

    Measured as DDP over one rank against no DDP; docs/records/scale-out.md has the table.
    """

    step_ns: float
    bucket_ns: float
    tensor_ns: float

    def filling_ns(self, buckets: Buckets) -> Floats:
        return self.bucket_ns + self.tensor_ns * buckets.tensors.astype(np.float64)


_COST_ON_CPU = DdpCost(step_ns=450_000, bucket_ns=60_000, tensor_ns=15_000)
_COST_ON_DEVICE = DdpCost(step_ns=300_000, bucket_ns=75_000, tensor_ns=35_000)
_CPU_COPY_BYTES_S = 27e9  # bytes read plus bytes written


def ddp_cost(*, on_host: bool) -> DdpCost:
    return _COST_ON_CPU if on_host else _COST_ON_DEVICE


class StepLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Where collectives go in a step, and what the host pays for them."""

    on_host: bool
    compute: int  # stream; -1 if the host computes
    comm: int  # stream
    end_of_backward: int  # call

    @property
    def cost(self) -> DdpCost:
        return ddp_cost(on_host=self.on_host)

    def collective(self, before: int, dur_ns: float, **more: Any) -> InsertedCall:
        given = {"gap_ns": self.cost.bucket_ns, **more}
        return InsertedCall(before=before, stream=self.comm, dur_ns=dur_ns, **given)


class ReduceRules(msgspec.Struct, frozen=True, kw_only=True):
    on_host: bool
    add_ddp: bool  # DDP's own cost is not in the step yet
    ceilings: Ceilings | None
    waiting_ns: float = 0.0  # what ranks wait for each other on top


def find_layout(graph: StepGraph, ready: Ints, *, on_host: bool) -> StepLayout:
    tasks = graph.tasks
    computing = tasks.kind == Kind.COMPUTE
    busy = np.bincount(tasks.stream[computing], tasks.dur_ns[computing], max(1, graph.streams))
    backward = np.flatnonzero(graph.calls.phase == Phase.BACKWARD)
    end = int(backward.max()) + 1 if len(backward) else 0
    return StepLayout(
        on_host=on_host,
        compute=-1 if on_host else int(busy.argmax()),
        comm=graph.streams,
        end_of_backward=max(end, int(ready.max(initial=0))),
    )


def first_forward_call(graph: StepGraph) -> int:
    """The number of calls if there is no forward."""
    forward = np.flatnonzero(graph.calls.phase == Phase.FORWARD)
    return int(forward.min(initial=len(graph.calls)))


def remove_traced(graph: StepGraph, traced: TracedExchange) -> StepGraph:
    """The step without its own exchange; the calls stay."""
    tasks = np.zeros(len(graph.tasks), np.bool_)
    tasks[traced.tasks] = True
    return remove(graph, Selection(calls=np.zeros(len(graph.calls), np.bool_), tasks=tasks))


def retime_traced(graph: StepGraph, traced: TracedExchange, dur_ns: Floats) -> StepGraph:
    durations = graph.tasks.dur_ns.copy()
    durations[traced.tasks] = dur_ns
    return replace(graph, tasks=replace(graph.tasks, dur_ns=durations))


def sum_gradients(
    graph: StepGraph,
    buckets: Buckets,
    transfers: TransferTimes,
    rules: ReduceRules,
    norm_buffers: NormBuffers | None = None,
) -> StepGraph:
    """Insert one all-reduce per bucket."""
    layout = find_layout(graph, buckets.ready, on_host=rules.on_host)
    inserted = _reduce(graph, buckets, transfers, layout, rules, "all_reduce")
    if rules.add_ddp and norm_buffers:
        inserted += _broadcast(graph, norm_buffers, transfers, layout, len(inserted))
    return insert_collectives(graph, inserted, layout.compute)


def _reduce(
    graph: StepGraph,
    buckets: Buckets,
    transfers: TransferTimes,
    layout: StepLayout,
    rules: ReduceRules,
    kind: str,
) -> list[InsertedCall]:
    """Collectives inside backward, and the wait for the last of them."""
    host: Floats = np.zeros(len(buckets))
    fill: Floats = np.zeros(len(buckets))
    if rules.add_ddp:
        host = layout.cost.filling_ns(buckets)
        fill = bucket_copy_ns(buckets, rules.ceilings, on_host=layout.on_host)
    durations, lost = _in_backward(graph, buckets, transfers, layout, kind, host + fill)
    durations = durations + rules.waiting_ns / max(1, len(buckets))
    inserted: list[InsertedCall] = []
    last = -1
    for number, before in enumerate(buckets.ready.tolist()):
        gap_ns = host[number]
        if layout.on_host:
            gap_ns += fill[number]
        elif rules.add_ddp:
            copy = {"dur_ns": fill[number], "kind": Kind.MEMORY}
            inserted.append(InsertedCall(before=before, stream=layout.compute, **copy))
        last = len(inserted)
        more = {"gap_ns": gap_ns, "call_ns": lost[number], "after_compute": True}
        inserted.append(layout.collective(before, durations[number], **more))
    finish_ns = layout.cost.step_ns if rules.add_ddp else 0.0
    copy_back_ns = float(fill.sum())
    return [*inserted, *_wait(layout, layout.end_of_backward, last, finish_ns, copy_back_ns)]


def _broadcast(
    graph: StepGraph,
    norm_buffers: NormBuffers,
    transfers: TransferTimes,
    layout: StepLayout,
    offset: int,
) -> list[InsertedCall]:
    """Before forward, which waits for it."""
    first = first_forward_call(graph)
    sizes = np.array(norm_buffers.messages_bytes, np.float64)
    inserted = [
        layout.collective(first, dur) for dur in transfers.expected_ns(sizes, "broadcast").tolist()
    ]
    host_ns = layout.cost.tensor_ns * norm_buffers.tensors
    return [*inserted, *_wait(layout, first, offset + len(inserted) - 1, host_ns)]


def _wait(
    layout: StepLayout, before: int, last: int, host_ns: float = 0.0, device_ns: float = 0.0
) -> list[InsertedCall]:
    """Wait for the collective `last`; then spend this much before going on."""
    if layout.on_host:
        return [
            InsertedCall(before=before, stream=layout.comm, host_waits=True),
            InsertedCall(
                before=before, stream=layout.comm, gap_ns=host_ns + device_ns, kind=Kind.MEMORY
            ),
        ]
    return [
        InsertedCall(
            before=before,
            stream=layout.compute,
            dur_ns=device_ns,
            gap_ns=host_ns,
            kind=Kind.MEMORY,
            after=last if last >= 0 else None,
        )
    ]


def bucket_copy_ns(buckets: Buckets, ceilings: Ceilings | None, *, on_host: bool) -> Floats:
    """Gradients copied into their bucket, or back: each byte is read once and written once."""
    moved = 2 * buckets.size_bytes.astype(np.float64)
    if on_host:
        return moved / _CPU_COPY_BYTES_S * 1e9
    if ceilings is None:
        return np.full(len(moved), FLOOR_NS)
    return copy_ns(moved, ceilings)


def _in_backward(
    graph: StepGraph,
    buckets: Buckets,
    transfers: TransferTimes,
    layout: StepLayout,
    kind: str,
    host_ns: Floats,
) -> tuple[Floats, Floats]:
    """How long each collective takes, and what the host loses meanwhile."""
    sizes = buckets.size_bytes.astype(np.float64)
    alone = transfers.expected_ns(sizes, kind)
    if not layout.on_host or transfers.contention is None:
        return alone, np.zeros(len(buckets))
    ended = np.append(0.0, replay(graph).called_ns + graph.calls.call_ns)  # by previous call
    spent = np.cumsum(host_ns)
    return chain_buckets(
        ended[buckets.ready] + spent,
        float(ended[layout.end_of_backward] + spent[-1]) if len(spent) else 0.0,
        alone,
        transfers.contended_ns(sizes, kind),
        transfers.contention.lost,
    )


def shard(
    graph: StepGraph, buckets: Buckets, transfers: TransferTimes, rules: ReduceRules, stage: int
) -> StepGraph:
    """ZeRO: scatter gradients in backward, divide the optimizer's work, gather parameters.

    Stages 1 and 2 gather once after the optimizer; stage 3 before forward and before backward.
    """
    share = 1.0 / transfers.ranks
    stepping = graph.calls.phase == Phase.OPTIMIZER
    graph = scale_calls(graph, stepping, share)
    graph = scale_tasks(graph, stepping[graph.tasks.call], share)
    layout = find_layout(graph, buckets.ready, on_host=rules.on_host)
    inserted = _reduce(graph, buckets, transfers, layout, rules, "reduce_scatter")
    gathers = transfers.expected_ns(buckets.size_bytes.astype(np.float64), "all_gather")
    lost = transfers.contention.lost if rules.on_host and transfers.contention else 0.0
    if stage < 3:
        inserted += _gather_at_end(len(graph.calls), gathers, layout, len(inserted))
    else:
        for starts, order in _find_blocks(graph, buckets, layout):
            inserted += _gather_ahead(starts, gathers[order], layout, len(inserted), lost)
    return insert_collectives(graph, inserted, layout.compute)


def _gather_at_end(
    end: int, gathers: Floats, layout: StepLayout, offset: int
) -> list[InsertedCall]:
    inserted = [layout.collective(end, dur, after_compute=True) for dur in gathers.tolist()]
    return [*inserted, *_wait(layout, end, offset + len(inserted) - 1)]


def _find_blocks(
    graph: StepGraph, buckets: Buckets, layout: StepLayout
) -> list[tuple[list[int], list[int]]]:
    """For forward, then for backward: where each bucket's layers begin, and the buckets' order.

    Layers run in reverse order in forward, each for the same share of the calls.
    """
    first = np.flatnonzero(graph.calls.phase == Phase.BACKWARD).min(initial=layout.end_of_backward)
    order = list(range(len(buckets)))
    edges = np.append(first, buckets.ready).astype(float)
    length = max(1.0, layout.end_of_backward - first)
    forward = np.flatnonzero(graph.calls.phase == Phase.FORWARD)
    in_backward = (edges[:-1].astype(int).tolist(), order)
    if not len(forward):
        return [in_backward]
    shares = 1.0 - np.clip((edges[1:] - first) / length, 0.0, 1.0)  # where a block begins
    starts = forward[np.minimum((shares * len(forward)).astype(int), len(forward) - 1)]
    return [(starts[::-1].tolist(), order[::-1]), in_backward]


def _gather_ahead(
    starts: list[int], gathers: Floats, layout: StepLayout, offset: int, lost: float
) -> list[InsertedCall]:
    """The first gather is exposed; each other one runs while the block before it computes."""
    inserted: list[InsertedCall] = []

    def launch(before: int, dur: float, lost_ns: float) -> int:
        inserted.append(layout.collective(before, dur, call_ns=lost_ns))
        return offset + len(inserted) - 1

    pending = launch(starts[0], float(gathers[0]), 0.0)
    for number, start in enumerate(starts):
        inserted += _wait(layout, start, pending)
        if number + 1 < len(starts):
            dur = float(gathers[number + 1])
            pending = launch(start, dur, lost * dur)
    return inserted
