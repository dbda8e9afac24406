"""More workers: a worker's own work, the slowest of them, and the gradients they exchange.

What is asked for about workers (how many, how large the buckets, which link, what is sharded) is
one plan. Whenever part of it changes, the step is planned again from what one worker computes.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from stepscope.predict import planned_exchange
from stepscope.predict.batch_size import SPREAD as BATCH_SPREAD
from stepscope.predict.batch_size import grow_batch
from stepscope.predict.collective_times import TransferTimes, find_transfer_times
from stepscope.predict.data_parallel import (
    ENOUGH_STEPS,
    Buckets,
    TracedExchange,
    fill_buckets,
    find_gradients,
    find_norm_buffers,
    find_straggling,
    find_traced_exchange,
    own_steps,
    slow_down,
    split_waiting,
)
from stepscope.predict.declaration import Outcome, Refused, changed
from stepscope.predict.fitted import fitted, table
from stepscope.predict.peaks import peak_at_batch
from stepscope.predict.planned_exchange import (
    compare_hierarchical,
    find_host_times,
    replicates_hosts,
    spans_hosts,
)
from stepscope.predict.stalls import describe_workers_stalls, grow_stalls, share_stalls
from stepscope.predict.step_context import Exchange, StepContext, WorkerPlan
from stepscope.records.hardware import find_device
from stepscope.records.normal import NORMAL_95
from stepscope.step.edit import scale_calls, scale_tasks
from stepscope.step.graph import Phase
from stepscope.step.replay import step_ns
from stepscope.step.work import Kind
from stepscope.text.figures import milliseconds, percent, significant, size
from stepscope.text.words import counted

if TYPE_CHECKING:
    from stepscope.step.graph import Floats, StepGraph

STRAGGLING_DOUBT = fitted("doubts.straggling")  # of what the slowest worker adds
# Of the step, by whether compute and links share cores.
MODEL_DOUBT = table("doubts.workers", tuple[float, float])
LINK_FLOOR = 0.98  # of what a worker takes by itself: links only add
# Of what a smaller share of the batch saves, on a GPU and on a CPU.
SHARE_DOUBT = (BATCH_SPREAD, fitted("doubts.share_on_cpu"))
# On a CPU this much of forward and backward does not shrink with the samples: libraries repack
# weights for every matmul.
_FIXED_SHARE = fitted("host.cpu_fixed_share")
_MB = 1 << 20


def replan(context: StepContext, **wanted: Any) -> Outcome:
    """The step under the plan so far and what is wanted now. Refuses what cannot be known."""
    bare = context.bare or context.graph
    bare_stalls = context.bare_stalls or context.stalls
    first = context.plan is None
    traced = find_present_exchange(context)
    before = traced.ranks if traced else 1
    old = context.plan or WorkerPlan(ranks=before)
    plan = replace(old, **wanted)
    plan = replace(plan, strong=plan.strong and plan.ranks != before)
    if plan.hosts and plan.ranks != plan.hosts.count * plan.hosts.per_host:
        raise Refused("hosts=N sets the number of workers: leave out workers=N")
    if plan == old:
        return Outcome(
            context=context, assumptions=("workers and links stay the same",), spread=0.0
        )
    if traced and traced.not_replicas and not (plan.hosts and replicates_hosts(context)):
        raise Refused(f"only replicas can be added and changed here, but {traced.not_replicas}")
    transfers = _planned_transfers(context, plan, traced)
    straggling = find_straggling(context, plan.ranks, before)
    planned = _PlannedStep(context, bare, plan, traced, before)
    graph = planned.build(transfers, straggling)
    # Collectives take no time, and inserted ones take none from compute either.
    comm, calls = graph.tasks.kind == Kind.COMM, graph.calls
    inserted = np.zeros(len(calls), np.bool_)
    inserted[graph.tasks.call[comm & (graph.tasks.row < 0)]] = True
    call_ns = np.where(inserted, 0.0, calls.call_ns)
    silent = replace(graph, calls=replace(calls, call_ns=call_ns))
    step, without = step_ns(graph), step_without_comm_ns(silent)
    own = without if planned.retimed else min(without, step_ns(planned.graph))
    result = Exchange(
        ranks=plan.ranks,
        before=before,
        basis=transfers.basis if transfers else "none",
        buckets=planned.count,
        size_bytes=planned.size_bytes,
        comm_ns=float(graph.tasks.dur_ns[comm].sum()),
        exposed_ns=max(0.0, step - without),
        least_ns=0.0 if plan.strong else LINK_FLOOR * min(step, own),
        straggling=straggling,
        held_bytes=planned.held_bytes,
    )
    result = replace(result, summary=_describe_exchange(plan, result, traced))
    assumptions = _assumptions(context, plan, result, transfers, planned)
    shared = grow_stalls(bare_stalls, planned.share)
    assumptions += describe_workers_stalls(shared, plan.ranks, before)
    after = replace(
        context,
        bare=bare,
        bare_stalls=bare_stalls,
        plan=plan,
        exchange=result,
        stalls=share_stalls(shared, plan.ranks, before),
    )
    return Outcome(
        context=changed(after, graph),
        assumptions=assumptions if first else (),
        spread=0.0,
        doubt=planned.doubt(graph, transfers, straggling) if first else 0.0,
        samples=1.0 if plan.strong else plan.ranks / (1.0 if old.strong else old.ranks),
        peak=peak_at_batch(context, context.grown * planned.share) if plan.strong else None,
    )


def find_present_exchange(context: StepContext) -> TracedExchange | None:
    """That of the trace, whatever was planned since."""
    return find_traced_exchange(context, context.bare or context.graph)


class _PlannedStep:
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
        self.add_ddp = traced is None
        self.norm_buffers = find_norm_buffers(context) if self.add_ddp else None
        self.share = before / plan.ranks if plan.strong else 1.0
        graph = share_of_batch(replace(context, graph=bare), before, self.share).graph
        self.own_ns = (0.0, 0.0)
        if plan.strong:
            self.own_ns = (step_without_comm_ns(bare), step_without_comm_ns(graph))
        has_tasks = traced is not None and len(traced.tasks) > 0
        self.retimed = has_tasks and plan.bucket_mb is None and not plan.stage
        self.graph = graph
        if self.retimed or plan.ranks < 2:
            self.buckets = traced.buckets if traced else None
        else:
            self.buckets = self._find_buckets(graph)
        self.waiting_ns = 0.0
        if has_tasks and not self.retimed and traced is not None:
            if traced.buckets:
                durations = graph.tasks.dur_ns[traced.tasks]
                self.waiting_ns = float(self._split_waiting(durations, traced)[0].sum())
            self.graph = planned_exchange.remove_traced(graph, traced)

    @property
    def count(self) -> int:
        return len(self.buckets) if self.buckets else 0

    @property
    def size_bytes(self) -> int:
        return int(self.buckets.size_bytes.sum()) if self.buckets else 0

    @property
    def held_bytes(self) -> int:
        plain_ddp = self.add_ddp and not self.plan.stage
        return self.size_bytes if plain_ddp and self.plan.ranks > 1 else 0

    def _find_buckets(self, graph: StepGraph) -> Buckets:
        traced, plan = self.traced, self.plan
        if traced and traced.buckets and plan.bucket_mb is None:
            return traced.buckets
        gradients = find_gradients(self.context, graph)
        if gradients is None:
            raise Refused(
                "the trace does not contain the gradients' sizes. Record a step that has a "
                "backward pass, with record_shapes=True"
            )
        if plan.bucket_mb is None:
            return fill_buckets(gradients)
        cap = round(plan.bucket_mb * _MB)
        return fill_buckets(gradients, cap, cap)

    def build(self, transfers: TransferTimes | None, straggling: float) -> StepGraph:
        """The graph with these transfers, its own work slowed by `straggling`."""
        graph, plan, traced = slow_down(self.graph, straggling), self.plan, self.traced
        if self.retimed and traced is not None:
            # Only the transfers change; what a rank waits for others inside them stays.
            durations = graph.tasks.dur_ns[traced.tasks]
            if transfers is None:
                return planned_exchange.retime_traced(graph, traced, np.zeros(len(durations)))
            if traced.buckets is None:
                raise Refused("the trace does not say how many bytes its all-reduces move")
            waiting, share = self._split_waiting(durations, traced)
            expected = transfers.expected_ns(traced.sizes)
            return planned_exchange.retime_traced(graph, traced, waiting + share * expected)
        if transfers is None or self.buckets is None:
            return graph
        rules = planned_exchange.ReduceRules(
            on_host=self.context.on_host,
            add_ddp=self.add_ddp,
            ceilings=self.context.ceilings,
            waiting_ns=self.waiting_ns,
        )
        if plan.stage:
            return planned_exchange.shard(graph, self.buckets, transfers, rules, plan.stage)
        return planned_exchange.sum_gradients(
            graph, self.buckets, transfers, rules, self.norm_buffers
        )

    def _split_waiting(self, durations: Floats, traced: TracedExchange) -> tuple[Floats, Floats]:
        return split_waiting(durations, traced.sizes, self.present_transfers)

    @cached_property
    def present_transfers(self) -> TransferTimes | None:
        """Of the traced exchange; with hosts asked about, from the same source as the new ones."""
        plan = WorkerPlan(ranks=self.before)
        if self.plan.hosts is None:
            return _planned_transfers(self.context, plan, self.traced)
        hosts = replace(self.plan.hosts, count=self.plan.hosts.before, link=None)
        try:
            return _planned_transfers(self.context, replace(plan, hosts=hosts), self.traced)
        except Refused:
            return _planned_transfers(self.context, plan, self.traced)

    def doubt(self, graph: StepGraph, transfers: TransferTimes | None, straggling: float) -> float:
        """Of the logarithm of the step: about the share of the batch, the link, and whether slow
        steps of different workers coincide."""
        share = share_doubt(*self.own_ns, step_ns(graph), on_host=self.context.on_host)
        if transfers is None:
            return share
        factor = math.exp(NORMAL_95 * transfers.spread)
        low, high = (
            step_ns(self.build(transfers.scaled(scale), straggling))
            for scale in (1 / factor, factor)
        )
        link = math.log(max(high, 1.0) / max(low, 1.0)) / (2 * NORMAL_95)
        usual = step_ns(self.build(transfers, 1.0)) if straggling != 1.0 else step_ns(graph)
        slow = STRAGGLING_DOUBT * abs(math.log(max(step_ns(graph), 1.0) / max(usual, 1.0)))
        return math.hypot(share, link, slow, MODEL_DOUBT[self.context.on_host])


def _planned_transfers(
    context: StepContext, plan: WorkerPlan, traced: TracedExchange | None
) -> TransferTimes | None:
    if plan.ranks < 2:
        if (plan.bandwidth, plan.latency, plan.stage, plan.bucket_mb) != (1.0, 1.0, 0, None):
            raise Refused(
                "this step exchanges nothing between ranks. Ask for workers=N together with it"
            )
        return None
    if plan.hosts is not None:
        times = find_host_times(context, traced, plan.hosts)
    else:
        # A job on several hosts says more about its links than a calibration of one host.
        profiles = context.profiles
        if context.job is not None and len(set(context.job.hosts.values())) > 1:
            profiles = tuple(filter(spans_hosts, profiles))
        times = find_transfer_times(
            plan.ranks,
            trace=context.trace,
            profiles=profiles,
            traced=traced.all_reduces if traced else None,
            device=find_device(context.trace.device_name or ""),
            on_host=context.on_host,
        )
    if times is None:
        raise Refused(
            f"the time of an all-reduce over {counted(plan.ranks, 'worker')} is unknown. Run "
            f"`stepscope calibrate --ranks {plan.ranks}` where the training runs, or "
            "`stepscope calibrate` under its launcher. A bare trace does not name its host"
        )
    return replace(times, bandwidth=plan.bandwidth, latency=plan.latency)


def share_of_batch(context: StepContext, workers: int, factor: float) -> StepContext:
    """The step with `factor` times the samples. On a CPU most of forward and backward scales.

    Refuses less than one sample per worker; `workers` is how many share the batch now.
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
    scaled = ((phase == Phase.FORWARD) | (phase == Phase.BACKWARD)) & (graph.calls.row >= 0)
    shared = scale_calls(graph, scaled, _FIXED_SHARE + (1 - _FIXED_SHARE) * factor)
    return replace(
        changed(context, shared),
        grown=context.grown * factor,
        stalls=grow_stalls(context.stalls, factor),
    )


def share_doubt(whole_ns: float, share_ns: float, step: float, *, on_host: bool) -> float:
    """Of the logarithm of the step, by a worker's own time with all and with part of the batch."""
    if not share_ns or not step:
        return 0.0
    moved = abs(math.log(max(whole_ns, 1.0) / share_ns))
    return SHARE_DOUBT[on_host] * min(1.0, moved) * min(1.0, share_ns / step)


def step_without_comm_ns(graph: StepGraph) -> float:
    return step_ns(scale_tasks(graph, graph.tasks.kind == Kind.COMM, 0.0))


# In words


def _assumptions(
    context: StepContext,
    plan: WorkerPlan,
    result: Exchange,
    transfers: TransferTimes | None,
    planned: _PlannedStep,
) -> tuple[str, ...]:
    lines = []
    if plan.ranks != result.before:
        own = "cores" if context.on_host else "a device"
        workers = counted(plan.ranks, "worker")
        lines.append(f"{result.before} -> {workers}, each with {own} of its own")
        if plan.hosts is not None:
            now, hosts = plan.hosts.before, counted(plan.hosts.count, "host")
            lines.append(f"{now} -> {hosts}, with {counted(plan.hosts.per_host, 'worker')} on each")
        batch = "each worker keeps its batch"
        if plan.strong:
            stays = (
                "A quarter of forward and backward is assumed to stay"
                if context.on_host
                else "CPU time and the shortest kernels stay the same"
            )
            batch = f"the workers share the batch. {stays}"
        lines.append(batch)
        steps = len(own_steps(context))
        if steps < ENOUGH_STEPS:
            lines.append(
                f"all workers are assumed to be equally fast: {counted(steps, 'step')} do not "
                "show how much they differ"
            )
        else:
            lines.append(
                f"the slowest of {result.ranks} needs {significant(result.straggling)} of a "
                f"typical step (expected maximum over {steps} measured steps, drawn independently)"
            )
    if transfers:
        lines.append(transfers.source)
        if plan.hosts and planned.buckets:
            largest = float(planned.buckets.size_bytes.max())
            compared = compare_hierarchical(context, planned.traced, plan.hosts, largest)
            lines += [compared] if compared else []
        if context.on_host and transfers.contention:
            lines.append(
                "there are as many cores as workers. Communication takes "
                f"{percent(transfers.contention.lost)} of its time from the compute beside it"
            )
        if planned.norm_buffers and not plan.stage:
            lines.append(
                f"statistics of {counted(planned.norm_buffers.norms, 'batch norm')} are sent "
                "before forward. DDP does so unless broadcast_buffers=False"
            )
        if result.held_bytes:
            lines.append(f"DDP's buckets take {size(result.held_bytes)} of every worker's memory")
        if not context.on_host and not planned.retimed:
            lines.append("communication and compute are assumed not to slow each other on the GPU")
    return tuple(lines)


def _describe_exchange(plan: WorkerPlan, result: Exchange, traced: TracedExchange | None) -> str:
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
    return (
        f"{kind} exchanges {size(result.size_bytes)} in {counted(result.buckets, 'bucket')} "
        f"{how}{link}. This takes {milliseconds(result.comm_ns / 1e6)}, of which "
        f"{milliseconds(result.exposed_ns / 1e6)} lengthen the step"
    )
