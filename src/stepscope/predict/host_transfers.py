"""How long collectives over N hosts take, with hops inside a host and between hosts kept apart.

The links between hosts come from what the user states, from a calibration over several hosts, or
from the capture's own collectives between hosts. Hops inside a host come from a calibration or a
capture of one host, or from the device's data sheet.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.predict.algorithms import Hop, hierarchical_over_hosts, hop_of_line, ring_over_hosts
from stepscope.predict.outcome import Refused
from stepscope.predict.traced_exchange import list_all_reduces
from stepscope.predict.transfers import (
    RINGS,
    TransferTimes,
    fits_trace,
    from_data_sheet,
    from_profiles,
    from_trace,
    halves,
    with_usual_contention,
)
from stepscope.predict.worker_plan import HostPlan
from stepscope.records.devices import find_device
from stepscope.records.figures import duration, rate
from stepscope.records.job import KINDS
from stepscope.records.profile import Contention
from stepscope.records.strategies import RankFullySharded, RankPipeline, RankTensorParallel
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepscope.predict.step_context import StepContext
    from stepscope.predict.traced_exchange import TracedExchange
    from stepscope.predict.transfers import TracedAllReduces
    from stepscope.predict.worker_plan import GivenLink
    from stepscope.records.job import CollectiveCalls
    from stepscope.records.profile import Profile

GIVEN_SPREAD = 0.25  # how far a stated link is from the one that training gets
# One message between hosts, if only the rate is stated: TCP for gloo, RDMA for NCCL and RCCL.
_TCP_LATENCY_NS, _RDMA_LATENCY_NS = 50_000.0, 10_000.0
_CPU_NS_PER_BYTE = 1.0  # of an all-reduce that only cores limit (docs/records/scale-out.md)
_SPLIT = (RankTensorParallel, RankPipeline)
_CORES_LOST = 0.7  # of that time, from compute on the same cores


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
            raise Refused(_unknown_link(hosts))
    return with_usual_contention(times) if context.on_host else times


def _unknown_link(hosts: HostPlan) -> str:
    shown = "has one host" if hosts.before == 1 else "shows no bandwidth between its hosts"
    return (
        f"the capture {shown}, so the link between hosts is unknown. State it as in "
        f"hosts={hosts.count}:10GB/s or hosts={hosts.count}:10GB/s:20us. Or capture a job on "
        "two hosts, or run `stepscope calibrate` under a launcher on several hosts"
    )


def compare_hierarchical(
    context: StepContext, traced: TracedExchange | None, hosts: HostPlan, size_bytes: float
) -> str:
    """What the largest message would take inside hosts first, then between them."""
    if hosts.count < 2 or hosts.per_host < 2 or not size_bytes:
        return ""
    inside = _inside_hop(context, traced, hosts)
    between = _between_hop(context, traced, hosts)
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
    times = from_profiles(ranks, _between_profiles(context, hosts))
    if times is None and traced and traced.all_reduces and hosts.before > 1:
        times = from_trace(ranks, traced.all_reduces, _backend(context))
    return times


def _between_profiles(context: StepContext, hosts: HostPlan) -> list[Profile]:
    """With the fits of groups like that of the exchange: all ranks, or one of each host."""
    several = [profile for profile in _profiles(context) if spans_hosts(profile)]
    alone = hosts.per_host == 1 and _ranks_per_host(context) > 1
    return [_only(profile, "inter-host" if alone else "world") for profile in several]


def _between_hop(
    context: StepContext, traced: TracedExchange | None, hosts: HostPlan
) -> Hop | None:
    if hosts.link is not None:
        return _given_hop(context, hosts.link)
    times = _between_times(context, traced, hosts)
    return hop_of_line(times.lines["all_reduce"], times.ranks) if times else None


# Inside a host


def _inside_hop(context: StepContext, traced: TracedExchange | None, hosts: HostPlan) -> Hop | None:
    if hosts.per_host < 2:
        return None
    times = _inside_times(context, traced, hosts.per_host)
    return hop_of_line(times.lines["all_reduce"], times.ranks) if times else None


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


def _ranks_per_host(context: StepContext) -> int:
    hosts = Counter(context.job.hosts.values() if context.job else ())
    return max(hosts.values(), default=1)
