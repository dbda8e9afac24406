"""More workers: a step's own work, the slowest of them, and the gradients they exchange.

What is asked for together (how many workers, how large the buckets, what link, what is sharded) is
one plan, and the step is planned anew from what one worker computes whenever part of it changes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.graph import Phase
from stepscope.explain.replay.schedule import step_ns
from stepscope.explain.work import Kind
from stepscope.predict import exchange
from stepscope.predict.batch_growth import SPREAD as BATCH_SPREAD
from stepscope.predict.batch_growth import grow_batch
from stepscope.predict.buckets import fill_buckets, find_gradients
from stepscope.predict.edit import scale_calls, scale_tasks
from stepscope.predict.norm_buffers import find_norm_buffers
from stepscope.predict.outcome import Outcome, Refused, changed
from stepscope.predict.peaks import peak_at_batch
from stepscope.predict.slowest_worker import ENOUGH_STEPS, find_straggling, own_steps, slow_down
from stepscope.predict.traced_exchange import find_traced_exchange, split_waiting
from stepscope.predict.transfers import find_transfer_times
from stepscope.predict.worker_plan import Exchange, WorkerPlan
from stepscope.records.devices import find_device
from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Floats, StepGraph
    from stepscope.predict.buckets import Buckets
    from stepscope.predict.step_context import StepContext
    from stepscope.predict.traced_exchange import TracedExchange
    from stepscope.predict.transfers import TransferTimes

STRAGGLING_DOUBT = 0.5  # of what the slowest adds, one standard deviation
MODEL_DOUBT = {True: 0.06, False: 0.03}  # of the step, by whether compute and links share cores
LINK_FLOOR = 0.98  # of what a worker takes by itself: links only add
SHARE_DOUBT = {True: 0.4, False: BATCH_SPREAD}  # of what a share of the batch takes away, likewise
# On a CPU this much of forward and backward does not shrink with the samples: the median of seven
# models (0.12 to 0.94), whose libraries repack weights for every product (docs/scale-out.md).
_STAYS = 0.25
_MB = 1 << 20


def replan(context: StepContext, **wanted: Any) -> Outcome:
    """The step under the plan so far and what is wanted now. Refuses what nobody can know."""
    bare = context.bare or context.graph
    first = context.plan is None
    traced = find_traced_exchange(context, bare)
    before = traced.ranks if traced else 1
    old = context.plan or WorkerPlan(ranks=before)
    plan = replace(old, **wanted)
    plan = replace(plan, strong=plan.strong and plan.ranks != before)
    if plan == old:
        return Outcome(
            context=context, assumptions=("workers and links stay as they are",), spread=0.0
        )
    if traced and traced.otherwise:
        raise Refused(f"only replicas can be added and changed here, and {traced.otherwise}")
    transfers = _transfers(context, plan, traced)
    straggling = find_straggling(context, plan.ranks, before)
    planned = _Planned(context, bare, plan, traced, before)
    graph = planned.step(transfers, straggling)
    step, without = step_ns(graph), step_ns(_without_comm(graph))
    own = without if planned.retimed else min(without, step_ns(planned.graph))
    told = Exchange(
        ranks=plan.ranks,
        before=before,
        basis=transfers.basis if transfers else "none",
        buckets=planned.count,
        size_bytes=planned.size_bytes,
        comm_ns=_comm_ns(graph),
        exposed_ns=max(0.0, step - without),
        least_ns=0.0 if plan.strong else LINK_FLOOR * min(step, own),
        straggling=straggling,
        held_bytes=planned.held_bytes,
    )
    told = replace(told, said=_about_exchange(plan, told, traced))
    said = _assumptions(context, plan, told, transfers, planned)
    return Outcome(
        context=changed(replace(context, bare=bare, plan=plan, exchange=told), graph),
        assumptions=said if first else (),
        spread=0.0,
        doubt=planned.doubt(graph, transfers, straggling) if first else 0.0,
        samples=_samples(plan, old),
        peak=peak_at_batch(context, context.grown * planned.share) if plan.strong else None,
    )


def _samples(plan: WorkerPlan, old: WorkerPlan) -> float:
    def share(each: WorkerPlan) -> float:
        return 1.0 if each.strong else float(each.ranks)

    return share(plan) / (share(old) if not plan.strong else 1.0)


class _Planned:
    """One step under one plan; links and stragglers can still vary."""

    def __init__(
        self,
        context: StepContext,
        bare: StepGraph,
        plan: WorkerPlan,
        traced: TracedExchange | None,
        before: int,
    ) -> None:
        self.context, self.plan, self.traced, self.before = context, plan, traced, before
        self.toll = traced is None
        self.statistics = find_norm_buffers(context) if self.toll else None
        self.share = before / plan.ranks if plan.strong else 1.0
        graph = share_of_batch(replace(context, graph=bare), before, self.share).graph
        self.own_ns = (
            (step_without_comm_ns(bare), step_without_comm_ns(graph)) if plan.strong else (0.0, 0.0)
        )
        keeps = traced is not None and len(traced.tasks) > 0
        self.retimed = keeps and plan.bucket_mb is None and not plan.stage
        self.graph = graph
        if self.retimed or plan.ranks < 2:
            self.buckets = traced.buckets if traced else None
        else:
            self.buckets = self._find_buckets(graph)
        self.waiting_ns = 0.0
        if keeps and not self.retimed and traced is not None:
            if traced.buckets:
                durations = graph.tasks.dur_ns[traced.tasks]
                self.waiting_ns = float(self._waiting(durations, traced.buckets)[0].sum())
            self.graph = exchange.without_traced(graph, traced)

    @property
    def count(self) -> int:
        return len(self.buckets) if self.buckets else 0

    @property
    def size_bytes(self) -> int:
        return int(self.buckets.size_bytes.sum()) if self.buckets else 0

    @property
    def held_bytes(self) -> int:
        plain = self.toll and not self.plan.stage
        return self.size_bytes if plain and self.plan.ranks > 1 else 0

    def _find_buckets(self, graph: StepGraph) -> Buckets:
        traced, plan = self.traced, self.plan
        if traced and traced.buckets and plan.bucket_mb is None:
            return traced.buckets
        gradients = find_gradients(self.context, graph)
        if gradients is None:
            raise Refused(
                "the trace does not give the gradients' sizes: record a step with backward in it "
                "and record_shapes=True"
            )
        if plan.bucket_mb is None:
            return fill_buckets(gradients)
        cap = round(plan.bucket_mb * _MB)
        return fill_buckets(gradients, cap, cap)

    def step(self, transfers: TransferTimes | None, straggling: float) -> StepGraph:
        """The graph of it."""
        graph, plan = slow_down(self.graph, straggling), self.plan
        if self.retimed and self.traced is not None:
            return self._retime(graph, self.traced, transfers)
        if transfers is None or self.buckets is None:
            return graph
        on_host, ceilings = self.context.on_host, self.context.ceilings
        if plan.stage:
            return exchange.shard(
                graph,
                self.buckets,
                transfers,
                plan.stage,
                on_host=on_host,
                toll=self.toll,
                ceilings=ceilings,
                waiting_ns=self.waiting_ns,
            )
        return exchange.sum_gradients(
            graph,
            self.buckets,
            transfers,
            on_host=on_host,
            toll=self.toll,
            ceilings=ceilings,
            statistics=self.statistics,
            waiting_ns=self.waiting_ns,
        )

    def _retime(
        self, graph: StepGraph, traced: TracedExchange, transfers: TransferTimes | None
    ) -> StepGraph:
        """Only what moves bytes changes; what a rank waits for others inside stays."""
        durations = graph.tasks.dur_ns[traced.tasks]
        if transfers is None:
            return exchange.retime_traced(graph, traced, np.zeros(len(durations)))
        if traced.buckets is None:
            raise Refused("the trace does not give how many bytes its all-reduces move")
        waiting, share = self._waiting(durations, traced.buckets)
        expected = transfers.expected_ns(traced.buckets.size_bytes.astype(np.float64))
        return exchange.retime_traced(graph, traced, waiting + share * expected)

    def _waiting(self, durations: Floats, buckets: Buckets) -> tuple[Floats, Floats]:
        now = _transfers(self.context, WorkerPlan(ranks=self.before), self.traced)
        return split_waiting(durations, buckets, now)

    def doubt(self, graph: StepGraph, transfers: TransferTimes | None, straggling: float) -> float:
        """Of the logarithm of the step: of the share, of the link, and whether slow steps meet."""
        share = share_doubt(*self.own_ns, step_ns(graph), on_host=self.context.on_host)
        if transfers is None:
            return share
        factor = math.exp(1.96 * transfers.spread)
        low, high = (
            step_ns(self.step(transfers.scaled(each), straggling)) for each in (1 / factor, factor)
        )
        link = math.log(max(high, 1.0) / max(low, 1.0)) / (2 * 1.96)
        usual = step_ns(self.step(transfers, 1.0)) if straggling != 1.0 else step_ns(graph)
        slow = STRAGGLING_DOUBT * abs(math.log(max(step_ns(graph), 1.0) / max(usual, 1.0)))
        return math.hypot(share, link, slow, MODEL_DOUBT[self.context.on_host])


def _transfers(
    context: StepContext, plan: WorkerPlan, traced: TracedExchange | None
) -> TransferTimes | None:
    if plan.ranks < 2:
        if (plan.bandwidth, plan.latency, plan.stage, plan.bucket_mb) != (1.0, 1.0, 0, None):
            raise Refused("nothing is exchanged in this step: ask for workers=N together with it")
        return None
    trace = context.trace
    found = find_transfer_times(
        plan.ranks,
        trace=trace,
        profiles=context.profiles,
        seen=traced.seen if traced else None,
        device=find_device(trace.device_name or ""),
        on_host=context.on_host,
    )
    if found is None:
        raise Refused(
            f"how long an all-reduce over {counted(plan.ranks, 'worker')} takes is not known: run "
            f"`stepscope calibrate --ranks {plan.ranks}` where the training runs, or `stepscope "
            "calibrate` under its launcher (a bare trace does not say its host)"
        )
    return replace(found, bandwidth=plan.bandwidth, latency=plan.latency)


def share_of_batch(context: StepContext, workers: int, factor: float) -> StepContext:
    """The step with so many times the samples. On a CPU most of forward and backward grows.

    Refuses less than one sample for each worker; `workers` have the batch together now.
    """
    if factor == 1.0:
        return context
    if context.batch and round(context.batch * factor, 6) < 1:
        many = round(workers / factor)
        whole = context.batch * workers
        raise Refused(f"a batch of {whole} is too small for {counted(many, 'worker')}")
    if not context.on_host:
        return grow_batch(context, factor).context
    graph = context.graph
    phase = graph.calls.phase
    passes = (phase == Phase.FORWARD) | (phase == Phase.BACKWARD)
    shared = scale_calls(graph, passes & (graph.calls.row >= 0), _STAYS + (1 - _STAYS) * factor)
    return replace(changed(context, shared), grown=context.grown * factor)


def share_doubt(whole_ns: float, share_ns: float, step: float, *, on_host: bool) -> float:
    """Of the logarithm of the step. A worker's own time with the whole batch and with its share."""
    if not share_ns or not step:
        return 0.0
    moved = abs(math.log(max(whole_ns, 1.0) / share_ns))
    return SHARE_DOUBT[on_host] * min(1.0, moved) * min(1.0, share_ns / step)


def step_without_comm_ns(graph: StepGraph) -> float:
    """The step if no collective took any time."""
    return step_ns(scale_tasks(graph, graph.tasks.kind == Kind.COMM, 0.0))


def _comm_ns(graph: StepGraph) -> float:
    return float(graph.tasks.dur_ns[graph.tasks.kind == Kind.COMM].sum())


def _without_comm(graph: StepGraph) -> StepGraph:
    """Collectives that take no time, and nothing from compute."""
    moving = graph.tasks.kind == Kind.COMM
    calls = graph.calls
    ours = np.zeros(len(calls), np.bool_)
    ours[graph.tasks.call[moving & (graph.tasks.row < 0)]] = True
    graph = replace(graph, calls=replace(calls, call_ns=np.where(ours, 0.0, calls.call_ns)))
    return scale_tasks(graph, moving, 0.0)


# In words


def _assumptions(
    context: StepContext,
    plan: WorkerPlan,
    told: Exchange,
    transfers: TransferTimes | None,
    planned: _Planned,
) -> tuple[str, ...]:
    said = []
    if plan.ranks != told.before:
        own = "cores" if context.on_host else "a device"
        said.append(f"{told.before} -> {counted(plan.ranks, 'worker')}, each with {own} of its own")
        said.append(describe_batch(on_host=context.on_host, strong=plan.strong))
        said.append(_about_straggling(context, told))
    if transfers:
        said.append(transfers.said)
        if context.on_host and transfers.contention:
            said.append(
                "as many cores as workers: communication takes "
                f"{transfers.contention.lost:.0%} of its time from compute beside it"
            )
        if planned.statistics and not plan.stage:
            said.append(
                f"statistics of {counted(planned.statistics.norms, 'batch norm')} are sent "
                "before forward, as "
                "DDP does unless broadcast_buffers=False"
            )
        if told.held_bytes:
            said.append(
                f"DDP's buckets take {told.held_bytes / 1e6:.1f} MB of every worker's memory"
            )
        if not context.on_host and not planned.retimed:
            said.append("communication and compute do not slow each other on the device")
    return tuple(said)


def describe_batch(*, on_host: bool, strong: bool) -> str:
    if not strong:
        return "each worker keeps its batch"
    if on_host:
        return "the batch stays and is shared; a quarter of forward and backward stays too, a guess"
    return "the batch stays and is shared; host time and the shortest kernels stay too"


def _about_straggling(context: StepContext, told: Exchange) -> str:
    steps = len(own_steps(context))
    if steps < ENOUGH_STEPS:
        return (
            "all workers are taken to be equally fast: how much they differ is not known from "
            f"{counted(steps, 'step')}"
        )
    return (
        f"the slowest of {told.ranks} needs {told.straggling:.3f} of a typical step (expected "
        f"maximum over {steps} measured steps, drawn independently)"
    )


def _about_exchange(plan: WorkerPlan, told: Exchange, traced: TracedExchange | None) -> str:
    if plan.ranks < 2:
        return ""
    kind = f"ZeRO stage {plan.stage}" if plan.stage else "DDP"
    how = "as traced" if traced and traced.buckets else "of DDP's usual size (1 MiB, then 25)"
    if plan.bucket_mb is not None:
        how = f"of {plan.bucket_mb:g} MiB"
    link = ""
    if plan.bandwidth != 1.0:
        link += f" at {plan.bandwidth:g} times the bandwidth"
    if plan.latency != 1.0:
        link += f" at {plan.latency:g} times the latency"
    buckets = counted(told.buckets, "bucket")
    return (
        f"{kind} exchanges {told.size_bytes / 1e6:.1f} MB in {buckets} {how}{link}: "
        f"{told.comm_ns / 1e6:.2f} ms, of which {told.exposed_ns / 1e6:.2f} ms lengthen the step"
    )
