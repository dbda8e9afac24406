"""Plan an exchange of gradients: DDP's buckets or ZeRO's shards put into a step, and how
long collectives over several hosts take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.predict.collective_times import (
    RINGS,
    Hop,
    TracedAllReduces,
    TransferTimes,
    fits_trace,
    from_data_sheet,
    from_profiles,
    from_trace,
    halves,
    hierarchical_over_hosts,
    hop_of_line,
    ring_over_hosts,
    with_usual_contention,
)
from stepscope.predict.data_parallel import (
    Buckets,
    NormBuffers,
    TracedExchange,
    chain_buckets,
    list_all_reduces,
)
from stepscope.predict.declaration import Refused
from stepscope.predict.fitted import fitted, table
from stepscope.predict.kernel_costs import FLOOR_NS, copy_ns, with_durations
from stepscope.predict.step_context import GivenLink, HostPlan, StepContext
from stepscope.records.hardware import Ceilings, Contention, Profile, find_device
from stepscope.records.job import KINDS, CollectiveCalls
from stepscope.records.strategies import RankFullySharded, RankPipeline, RankTensorParallel
from stepscope.step.edit import (
    InsertedCall,
    Selection,
    insert_collectives,
    remove,
    scale_calls,
    scale_tasks,
)
from stepscope.step.graph import Phase, StepGraph
from stepscope.step.replay import replay
from stepscope.step.work import Kind
from stepscope.text.figures import duration, rate
from stepscope.text.words import counted

if TYPE_CHECKING:
    from stepscope.step.graph import Floats, Ints

# Collectives run one after the other on a stream of their own. On an accelerator each waits for the
# compute launched before it, and the compute after backward waits for the last one. If the CPU is
# the device, the host itself waits.


class DdpCost(msgspec.Struct, frozen=True, kw_only=True):
    """What DDP itself costs the host: per step, per bucket and per tensor."""

    step_ns: float
    bucket_ns: float
    tensor_ns: float

    def filling_ns(self, buckets: Buckets) -> Floats:
        return self.bucket_ns + self.tensor_ns * buckets.tensors.astype(np.float64)


_COST_ON_CPU, _COST_ON_DEVICE = table("host.ddp_on_cpu", DdpCost), table("host.ddp_on_gpu", DdpCost)
_CPU_COPY_BYTES_S = fitted("host.cpu_copy_bytes_s")  # bytes read plus bytes written


class StepLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Where collectives go in a step, and what the host pays for them."""

    on_host: bool
    compute: int  # stream; -1 if the host computes
    comm: int  # stream
    end_of_backward: int  # call

    @property
    def cost(self) -> DdpCost:
        return _COST_ON_CPU if self.on_host else _COST_ON_DEVICE

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


def remove_traced(graph: StepGraph, traced: TracedExchange) -> StepGraph:
    """The step without its own exchange; the calls stay."""
    tasks = np.zeros(len(graph.tasks), np.bool_)
    tasks[traced.tasks] = True
    return remove(graph, Selection(calls=np.zeros(len(graph.calls), np.bool_), tasks=tasks))


def retime_traced(graph: StepGraph, traced: TracedExchange, dur_ns: Floats) -> StepGraph:
    durations = graph.tasks.dur_ns.copy()
    durations[traced.tasks] = dur_ns
    return with_durations(graph, durations)


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
    if rules.add_ddp and norm_buffers:  # sent before forward, which waits for it
        forward = np.flatnonzero(graph.calls.phase == Phase.FORWARD)
        first = int(forward.min(initial=len(graph.calls)))
        sizes = np.array(norm_buffers.messages_bytes, np.float64)
        for dur in transfers.expected_ns(sizes, "broadcast").tolist():
            inserted.append(layout.collective(first, dur))
        host_ns = layout.cost.tensor_ns * norm_buffers.tensors
        inserted += _wait(layout, first, len(inserted) - 1, host_ns)
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
    # How long each collective takes, and what the host loses meanwhile.
    sizes = buckets.size_bytes.astype(np.float64)
    durations, lost = transfers.expected_ns(sizes, kind), np.zeros(len(buckets))
    if layout.on_host and transfers.contention is not None:
        ended = np.append(0.0, replay(graph).called_ns + graph.calls.call_ns)  # by previous call
        spent = np.cumsum(host + fill)
        durations, lost = chain_buckets(
            ended[buckets.ready] + spent,
            float(ended[layout.end_of_backward] + spent[-1]) if len(spent) else 0.0,
            durations,
            transfers.contended_ns(sizes, kind),
            transfers.contention.lost,
        )
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
        end = len(graph.calls)
        for dur in gathers.tolist():
            inserted.append(layout.collective(end, dur, after_compute=True))
        inserted += _wait(layout, end, len(inserted) - 1)
    else:
        for starts, order in _find_blocks(graph, buckets, layout):
            inserted += _gather_ahead(starts, gathers[order], layout, len(inserted), lost)
    return insert_collectives(graph, inserted, layout.compute)


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


# How long collectives over N hosts take, with hops inside a host and between hosts kept apart.
#
# The links between hosts come from what the user states, from a calibration over several hosts, or
# from the capture's own collectives between hosts. Hops inside a host come from a calibration or a
# capture of one host, or from the device's data sheet.

GIVEN_SPREAD = fitted("doubts.given_link")  # how far a stated link is from what training gets
# One message between hosts, if only the rate is stated: TCP for gloo, RDMA for NCCL and RCCL.
_TCP_LATENCY_NS, _RDMA_LATENCY_NS = fitted("links.tcp_message_ns"), fitted("links.rdma_message_ns")
_CPU_NS_PER_BYTE = fitted("links.cpu_ns_per_byte")  # of an all-reduce that only cores limit
_CORES_LOST = fitted("links.contention_lost")  # of that time, from compute on the same cores
_SPLIT = (RankTensorParallel, RankPipeline)


def hosts_now(context: StepContext, traced: TracedExchange | None) -> HostPlan:
    """The hosts of the ranks that sum gradients together. Refuses if they are not known."""
    job = context.job
    if traced is None or traced.ranks < 2:
        return HostPlan(count=1, per_host=1, before=1)
    if job is None or not job.hosts:
        raise Refused("the capture does not say on which hosts its ranks are")
    ranks = traced.members or (job.ranks if len(job.ranks) == traced.ranks else ())
    named = [job.hosts.get(rank) for rank in ranks]
    if not named or None in named:
        raise Refused(
            f"the hosts of all {counted(traced.ranks, 'rank')} that exchange gradients must "
            f"be known, but only those of {sum(name is not None for name in named)} are"
        )
    by_host = Counter(named)
    if len(set(by_host.values())) > 1:
        uneven = ", ".join(f"{host} {ranks}" for host, ranks in sorted(by_host.items())[:4])
        raise Refused(f"hosts with different numbers of ranks cannot be multiplied ({uneven})")
    return HostPlan(count=len(by_host), per_host=len(named) // len(by_host), before=len(by_host))


def replicates_hosts(context: StepContext) -> bool:
    """Whether parameters are sharded inside hosts and replicated over them (HSDP): more hosts are
    then more replicas."""
    hosts = context.job.hosts if context.job else {}
    sharded = [s for s in context.analysis.strategies if isinstance(s, RankFullySharded)]
    others = [s for s in context.analysis.strategies if isinstance(s, _SPLIT)]
    return (
        bool(sharded and sharded[0].replicate_groups)
        and not others
        and all(
            group.ranks and len({hosts.get(rank, rank) for rank in group.ranks}) == 1
            for group in sharded[0].groups
        )
    )


def spans_hosts(profile: Profile) -> bool:
    """Whether its ranks were on several hosts; older profiles show it by their groups."""
    if profile.hosts is not None:
        return profile.hosts > 1
    return any(fit.group == "inter-host" for fit in profile.fits)


def find_host_times(
    context: StepContext, traced: TracedExchange | None, hosts: HostPlan
) -> TransferTimes | None:
    """All-reduces over these hosts; None if one rank is left. Refuses what cannot be known."""
    if hosts.count * hosts.per_host < 2:
        return None
    if hosts.count == 1:
        times = _inside_times(context, traced, hosts.per_host)
        if times is None:
            raise Refused(
                "the speed of collectives inside one host is unknown. Run `stepscope "
                f"calibrate --ranks {hosts.per_host}` on a host of the job"
            )
    elif hosts.link is not None:
        return _given_times(context, traced, hosts, hosts.link)
    else:
        times = _between_times(context, traced, hosts)
        if times is None:
            one = hosts.before == 1
            shown = "has one host" if one else "shows no bandwidth between its hosts"
            raise Refused(
                f"the capture {shown}, so the link between hosts is unknown. State it as in "
                f"hosts={hosts.count}:10GB/s or hosts={hosts.count}:10GB/s:20us. Or capture a job "
                "on two hosts, or run `stepscope calibrate` under a launcher on several hosts"
            )
    return with_usual_contention(times) if context.on_host else times


def compare_hierarchical(
    context: StepContext, traced: TracedExchange | None, hosts: HostPlan, size_bytes: float
) -> str:
    """What the largest message would take inside hosts first, then between them."""
    if hosts.count < 2 or hosts.per_host < 2 or not size_bytes:
        return ""
    inside = _inside_hop(context, traced, hosts)
    between = _given_hop(context, hosts.link) if hosts.link else None
    if between is None:
        between = _hop_of(_between_times(context, traced, hosts))
    if inside is None or between is None:
        return ""
    flat = ring_over_hosts(hosts.count, hosts.per_host, inside, between).at(size_bytes)
    parts = hierarchical_over_hosts(hosts.count, hosts.per_host, inside, between).at(size_bytes)
    return (
        f"all ranks form one ring, as slow as its slowest hop: {duration(flat)} for the "
        "largest bucket. A hierarchical all-reduce (inside hosts, then between them) would "
        f"take {duration(parts)}"
    )


# Between hosts


def _given_times(
    context: StepContext, traced: TracedExchange | None, hosts: HostPlan, link: GivenLink
) -> TransferTimes:
    between = _given_hop(context, link)
    inside = _inside_hop(context, traced, hosts)
    line = ring_over_hosts(
        hosts.count, hosts.per_host, inside, between, tree_latency=_backend(context) not in RINGS
    )
    assumed = "" if link.latency_ns is not None else ", a usual latency"
    unknown = ". Hops inside a host are assumed to be no slower" if not inside else ""
    source = (
        f"all-reduces over {counted(hosts.count, 'host')} at the stated {rate(link.bytes_s, 'B/s')}"
        f" of each host's link and {duration(between.alpha_ns)} for a message{assumed}"
        f"{unknown if hosts.per_host > 1 else ''}"
    )
    # A slow link leaves the cores idle: they lose only the time that moving the bytes takes them.
    busy = min(1.0, _CPU_NS_PER_BYTE / max(line.beta_ns_per_byte, 1e-9))
    ranks = hosts.count * hosts.per_host
    contention = Contention(group_size=ranks, lost=_CORES_LOST * busy, beside=(line,))
    return TransferTimes(
        ranks=ranks,
        basis="given",
        source=source,
        spread=GIVEN_SPREAD,
        lines={"all_reduce": (line,), **halves((line,))},
        contention=contention if context.on_host else None,
    )


def _given_hop(context: StepContext, link: GivenLink) -> Hop:
    latency = link.latency_ns
    if latency is None:
        latency = _TCP_LATENCY_NS if _backend(context) in RINGS else _RDMA_LATENCY_NS
    return Hop(alpha_ns=latency, beta_ns_per_byte=1e9 / link.bytes_s)


def _between_times(
    context: StepContext, traced: TracedExchange | None, hosts: HostPlan
) -> TransferTimes | None:
    """Calibrated over several hosts, else as the capture's own collectives between hosts."""
    ranks = hosts.count * hosts.per_host
    # Fits of groups like that of the exchange: all ranks, or one of each host.
    job_hosts = Counter(context.job.hosts.values() if context.job else ())
    alone = hosts.per_host == 1 and max(job_hosts.values(), default=1) > 1
    group = "inter-host" if alone else "world"
    several = [profile for profile in _profiles(context) if spans_hosts(profile)]
    times = from_profiles(ranks, [_only(profile, group) for profile in several])
    if times is None and traced and traced.all_reduces and hosts.before > 1:
        times = from_trace(ranks, traced.all_reduces, _backend(context))
    return times


def _hop_of(times: TransferTimes | None) -> Hop | None:
    return hop_of_line(times.lines["all_reduce"], times.ranks) if times else None


# Inside a host


def _inside_hop(context: StepContext, traced: TracedExchange | None, hosts: HostPlan) -> Hop | None:
    if hosts.per_host < 2:
        return None
    return _hop_of(_inside_times(context, traced, hosts.per_host))


def _inside_times(
    context: StepContext, traced: TracedExchange | None, ranks: int
) -> TransferTimes | None:
    """Over `ranks` ranks of one host."""
    profiles = [
        _only(profile, "intra-host" if spans_hosts(profile) else "world")
        for profile in _profiles(context)
    ]
    times = from_profiles(ranks, profiles)
    inside = find_inside_all_reduces(context, traced)
    if times is None and inside is not None:
        times = from_trace(ranks, inside, _backend(context))
    device = find_device(context.trace.device_name or "")
    if times is None and device is not None and not context.on_host:
        times = from_data_sheet(ranks, device)
    return times


def find_inside_all_reduces(
    context: StepContext, traced: TracedExchange | None
) -> TracedAllReduces | None:
    """The all-reduces in groups that lie on one host; None if there is none with a known size."""
    calls = context.analysis.collective_calls[0]
    hosts = context.job.hosts if context.job else {}
    if traced and traced.all_reduces and len(set(hosts.values())) == 1:
        return traced.all_reduces
    near = {
        place: len(group.ranks)
        for place, group in enumerate(calls.groups)
        if len(group.ranks) > 1 and len({hosts.get(rank, rank) for rank in group.ranks}) == 1
    }
    sizes = [size for size in sorted(set(near.values())) if _known(calls, near, size).any()]
    if not sizes:
        return None
    return list_all_reduces(calls, _known(calls, near, sizes[-1]), sizes[-1])


def _known(calls: CollectiveCalls, groups: dict[int, int], size: int) -> np.ndarray:
    """All-reduces of known size in the groups of `size` ranks."""
    places = [place for place, ranks in groups.items() if ranks == size]
    reduces = calls.kind == KINDS.index("all_reduce")
    return np.asarray(reduces & np.isin(calls.group, places) & (calls.size_bytes > 0))


# What is known


def _profiles(context: StepContext) -> Iterable[Profile]:
    return [profile for profile in context.profiles if fits_trace(profile, context.trace)]


def _only(profile: Profile, group: str) -> Profile:
    return replace(profile, fits=tuple(fit for fit in profile.fits if fit.group == group))


def _backend(context: StepContext) -> str | None:
    return "gloo" if context.on_host else context.trace.backend
