"""Hosts of a job: which ranks are on which, their clocks, the links between them, and all-
reduces that go by host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.records.job import (
    KINDS,
    Clock,
    ClockSet,
    CollectiveCalls,
    HierarchicalAllReduce,
    HostClock,
    RankPart,
    Reach,
    Straggler,
)
from stepscope.records.normal import median
from stepscope.records.quality import Note
from stepscope.records.rank_facts import HostLink, NetworkPlace, PeerTraffic
from stepscope.text.figures import byte_rate, duration, percent
from stepscope.text.words import counted
from stepscope.trace.clock_offsets import describe_hosts

# Which ranks are on which host, and whether a group stays inside one.


class HostColumns(msgspec.Struct, frozen=True, kw_only=True):
    """A host, and the columns of its ranks in a matrix of (steps, ranks)."""

    host: str
    columns: tuple[int, ...]


def columns_by_host(ranks: Sequence[int], hosts: Mapping[int, str]) -> tuple[HostColumns, ...]:
    """In the order of their first ranks; nothing unless every rank's host is known and they have
    several."""
    places: dict[str, list[int]] = {}
    for column, rank in enumerate(ranks):
        if rank not in hosts:
            return ()
        places.setdefault(hosts[rank], []).append(column)
    if len(places) < 2:
        return ()
    return tuple(HostColumns(host=host, columns=tuple(on)) for host, on in places.items())


def hosts_of(parts: Sequence[RankPart]) -> dict[int, str]:
    """The host of every rank whose host is known."""
    return {part.rank: part.host for part in parts if part.host}


def places_of(parts: Sequence[RankPart]) -> dict[str, NetworkPlace]:
    """Where each host stands in the network, by the first of its ranks that tells."""
    places: dict[str, NetworkPlace] = {}
    for part in parts:
        if part.host and part.network_place:
            places.setdefault(part.host, part.network_place)
    return places


def ranks_by_host(hosts: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """In the order of their first ranks."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(hosts):
        ranks.setdefault(hosts[rank], []).append(rank)
    return {host: tuple(on) for host, on in ranks.items()}


def reach_of(ranks: Iterable[int], size: int | None, hosts: Mapping[int, str]) -> Reach | None:
    """Whether these ranks of a group of `size` are on one host. One rank that is missing may be on
    another host, so a group is inside a host only if all of it is known."""
    known = [rank for rank in set(ranks) if rank in hosts]
    if len({hosts[rank] for rank in known}) > 1:
        return "between hosts"
    return "inside host" if known and len(known) == size else None


# The links between hosts: how fast each sends, and which one is slower than the others.
#
# A connection is busy while something waits to be sent or acknowledged, unless the receiver has no
# room. Its bytes over that time are a rate that does not depend on how often the connection has
# something to send: in a ring, all links move the same bytes in the same time, and only the slow
# one is busy for all of it. Acknowledgements may queue behind the data of the other direction, so
# the kernel's own estimate counts where it is higher.
#
# A link is slow when it reaches less than half the median rate of the others, and needs, for its
# bytes and at its rate, at least half of the time that ranks wait for transfers: the rates of fast
# links are those of the processors at their ends. Links that are all alike accuse nobody, however
# slow.

SLOW = 0.5  # of the other links' median rate
LEAST_TRAFFIC = 0.25  # of the busiest link's bytes: a link with less carries something else
LEAST_NEEDED = 0.5  # of the transfers that ranks wait for
LEAST_COST = 0.05  # of the step
_LOOPBACK = ("127.", "::1")


class SlowLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link against the median of the others."""

    link: HostLink
    others_bytes_s: float

    @property
    def slowdown(self) -> float:
        return self.others_bytes_s / self.link.rate_bytes_s


def list_host_links(parts: Sequence[RankPart]) -> tuple[HostLink, ...]:
    """One for each pair of hosts and direction, the slowest first; none where they are not known
    or send by other means than TCP."""
    hosts = _hosts_of_addresses(parts)
    traffic: dict[tuple[str, str], list[tuple[PeerTraffic, int]]] = {}
    speeds: dict[str, list[float]] = {}
    for part in parts:
        if part.links is None or part.host is None:
            continue
        steps = max(1, part.links.steps[-1] - part.links.steps[0]) if part.links.steps else 1
        for peer in part.links.peers:
            receiver = hosts.get(peer.peer)
            if receiver is None or receiver == part.host or peer.peer.startswith(_LOOPBACK):
                continue
            traffic.setdefault((part.host, receiver), []).append((peer, steps))
            mbit_s = part.links.device_mbit_s.get(peer.local)
            if mbit_s:
                speeds.setdefault(part.host, []).append(mbit_s * 1e6 / 8)
    links = [
        _add_up(sender, receiver, rows, max(speeds.get(sender, [0.0])) or None)
        for (sender, receiver), rows in traffic.items()
    ]
    return tuple(sorted(filter(None, links), key=lambda link: link.rate_bytes_s))


def _hosts_of_addresses(parts: Sequence[RankPart]) -> dict[str, str]:
    """Without addresses that several hosts have, each for itself."""
    owners: dict[str, set[str]] = {}
    for part in parts:
        if part.links is not None and part.host is not None:
            for address in part.links.addresses:
                owners.setdefault(address, set()).add(part.host)
    return {address: next(iter(names)) for address, names in owners.items() if len(names) == 1}


def _add_up(
    sender: str,
    receiver: str,
    rows_and_steps: list[tuple[PeerTraffic, int]],
    device_bytes_s: float | None,
) -> HostLink | None:
    rows = [row for row, _ in rows_and_steps]
    sent = sum(row.sent_bytes for row in rows)
    busy_us = sum(_busy_us(row) for row in rows)
    if not busy_us or not sent:
        return None
    connections = max(1, sum(row.connections for row in rows))
    steady = sent / busy_us * 1e6
    estimates = [row.delivery_bytes_s for row in rows if row.delivery_bytes_s]
    return HostLink(
        sender=sender,
        receiver=receiver,
        connections=connections,
        sent_bytes=sent,
        needs_step_ns=max(_needs_ns(row) / steps for row, steps in rows_and_steps),
        steady_bytes_s=steady,
        rate_bytes_s=max(steady, median(estimates) if estimates else 0.0),
        rtt_us=min((row.rtt_us for row in rows if row.rtt_us is not None), default=None),
        retransmitted=sum(row.retransmitted for row in rows),
        device_bytes_s=device_bytes_s,
    )


def _needs_ns(row: PeerTraffic) -> float:
    """For all that one of its connections has sent."""
    steady = row.sent_bytes / max(1, _busy_us(row)) * 1e6
    return 1e9 * row.sent_bytes / row.connections / max(steady, row.delivery_bytes_s or 0.0, 1.0)


def _busy_us(row: PeerTraffic) -> int:
    return max(0, row.busy_us - row.receiver_limited_us)


def find_slow_links(links: Sequence[HostLink]) -> list[SlowLink]:
    """The slowest first."""
    most = max((link.sent_bytes for link in links), default=0)
    used = [link for link in links if link.sent_bytes >= LEAST_TRAFFIC * most]
    if len(used) < 2:
        return []
    slow = []
    for place, link in enumerate(used):
        others = used[:place] + used[place + 1 :]
        usual = median([other.rate_bytes_s for other in others])
        if link.rate_bytes_s < SLOW * usual:
            slow.append(SlowLink(link=link, others_bytes_s=usual))
    return sorted(slow, key=lambda one: one.link.rate_bytes_s)


def blame_links(
    links: Sequence[HostLink], exposed_ns: Sequence[float], step_ns: float
) -> tuple[Straggler, ...]:
    """Slow links whose transfers cost enough, one entry for each host that they belong to.

    `exposed_ns`: for each recorded step, the transfers between hosts that nothing hides.
    """
    if not len(exposed_ns) or step_ns <= 0:
        return ()
    exposed = float(np.mean(exposed_ns))
    least_ns = LEAST_NEEDED * exposed
    slow = [one for one in find_slow_links(links) if one.link.needs_step_ns >= least_ns]
    if exposed <= 0 or not slow:
        return ()
    stragglers = []
    for host, its_links in _by_host(slow):
        worst = its_links[0]
        cost_ns = exposed * (1 - 1 / worst.slowdown)
        if cost_ns >= LEAST_COST * step_ns:
            stragglers.append(_straggler(host, its_links, cost_ns, exposed, len(exposed_ns)))
    return tuple(stragglers)


def _by_host(slow: Sequence[SlowLink]) -> Iterator[tuple[str, list[SlowLink]]]:
    """The host that most slow links share comes first; a single link is its sender's."""
    left = list(slow)
    while left:
        count: dict[str, int] = {}
        for one in left:
            for host in (one.link.sender, one.link.receiver):
                count[host] = count.get(host, 0) + 1
        host = max(count, key=lambda name: (count[name], name == left[0].link.sender))
        its_links = [one for one in left if host in (one.link.sender, one.link.receiver)]
        yield host, its_links
        left = [one for one in left if one not in its_links]


def _straggler(
    host: str, slow: Sequence[SlowLink], cost_ns: float, exposed_ns: float, steps: int
) -> Straggler:
    worst = slow[0]
    link = worst.link
    if not link.device_bytes_s:
        against_device: tuple[str, ...] = ()
    else:
        share = percent(link.rate_bytes_s / link.device_bytes_s)
        against_device = (f"that is {share} of what {link.sender}'s network device can send",)
    return Straggler(
        rank=None,
        cause="link",
        slowdown=worst.slowdown,
        cost_ms=cost_ns / 1e6,
        steps=steps,
        of=steps,
        evidence=(
            link_words(worst),
            *(link_words(one) for one in slow[1:3]),
            f"ranks wait {duration(exposed_ns)} per step for transfers between hosts that do not "
            "overlap with compute",
            *against_device,
        ),
        scope="link",
        host=host,
        link=(worst.link.sender, worst.link.receiver),
    )


def link_words(slow: SlowLink) -> str:
    link = slow.link
    return (
        f"the link from {link.sender} to {link.receiver} sends {byte_rate(link.rate_bytes_s)}, the "
        f"others {byte_rate(slow.others_bytes_s)}"
    )


# What to know about the clocks of the ranks and their hosts before trusting waits.

_APART_NS = 1_000_000_000
_OFF_NS = 1_000_000  # an unkept clock that is closer harms nobody yet


def about_hosts(clock: Clock, parts: Sequence[RankPart]) -> Clock:
    """The same clock, with those of the hosts, and why meetings failed."""
    problems = dict.fromkeys(problem for part in parts for problem in part.clock_notes)
    return replace(clock, hosts=describe_hosts(parts, clock), notes=tuple(problems))


def clock_notes(clock: Clock) -> Iterator[Note]:
    yield from _alignment_notes(clock)
    for host in clock.hosts:
        if host.was_set:
            detail = f"the clock of {host.host} was set {_set_words(host.was_set[0])}"
            rest = "; waits in these steps are not known, all others are aligned"
            yield Note(id="host-clock-set", detail=f"{detail}{rest}", count=len(host.was_set))
    if clock.notes:
        yield Note(id="clock-meetings", detail=clock.notes[0], count=len(clock.notes))
    adrift = unkept_hosts(clock)
    if adrift:
        yield Note(id="clock-not-kept", detail=unkept_words(adrift), count=len(adrift))


def _alignment_notes(clock: Clock) -> Iterator[Note]:
    if clock.contradicts:
        yield Note(id="clocks-contradict", detail=clock.detail)
        return
    far = {rank: ns for rank, ns in clock.offset_ns.items() if abs(ns) > _APART_NS}
    if far:
        rank, ns = max(far.items(), key=lambda pair: abs(pair[1]))
        detail = f"clocks are {duration(abs(ns))} apart (rank {rank}); they were aligned"
        yield Note(id="clocks-apart", detail=detail, count=len(far))
    if clock.unconnected:
        yield Note(id="rank-not-aligned", detail=clock.detail)


def _set_words(setting: ClockSet) -> str:
    way = "forward" if setting.by_ns > 0 else "back"
    words = f"{duration(abs(setting.by_ns))} {way}"
    if setting.after_step is None or setting.before_step is None:
        return words
    return f"{words} between steps {setting.after_step} and {setting.before_step}"


def unkept_hosts(clock: Clock) -> list[HostClock]:
    """Hosts that neither NTP nor PTP keeps and that are off by more than 1 ms, the worst first."""
    hosts = [
        host
        for host in clock.hosts
        if host.synchronised is False and abs(host.offset_ns or 0) > _OFF_NS
    ]
    return sorted(hosts, key=lambda host: -abs(host.offset_ns or 0))


def unkept_words(hosts: Sequence[HostClock]) -> str:
    worst = hosts[0]
    off_ns = worst.offset_ns or 0
    others = f", and {counted(len(hosts) - 1, 'more host')}" if len(hosts) > 1 else ""
    return (
        f"the clock of {worst.host}{others} is not kept by NTP or PTP: it is "
        f"{duration(abs(off_ns))} {'ahead' if off_ns > 0 else 'behind'}; start chronyd there"
    )


# An all-reduce in parts: reduced inside each host, then between hosts, then spread inside again.
#
# A rank shows it as a reduce-scatter (or reduce) in a group inside its host, an all-reduce of what
# is left in a group with ranks of other hosts, and an all-gather (or broadcast) in the first group.
# With sharded parameters (HSDP) the last part is missing: parameters are gathered when needed.

_FIRST = {"reduce_scatter": "all_gather", "reduce": "broadcast"}  # and what spreads the result
_ALIKE = 0.02  # sizes may differ by padding


class _Call(NamedTuple):
    kind: str
    group: int
    size: int
    start: int
    end: int


class _Triple(NamedTuple):
    inside: _Call
    between: _Call
    spread: _Call | None


def find_hierarchical(
    parts: Sequence[RankPart], hosts: Mapping[int, str]
) -> tuple[HierarchicalAllReduce, ...]:
    """One record per form, message size and groups' sizes; the longest first."""
    if len(set(hosts.values())) < 2:
        return ()
    seen: dict[tuple[str, str | None, int, int, int], list[_Triple]] = defaultdict(list)
    taking_part: dict[tuple[str, str | None, int, int, int], set[int]] = defaultdict(set)
    steps = 0
    for part in parts:
        steps += len(part.pace)
        for triple in _triples(part.calls, hosts):
            near = part.calls.groups[triple.inside.group].size or 0
            far = part.calls.groups[triple.between.group].size or 0
            gather = triple.spread.kind if triple.spread else None
            key = (triple.inside.kind, gather, triple.inside.size, near, far)
            seen[key].append(triple)
            taking_part[key].add(part.rank)
    mean_steps = steps / max(1, len(parts))
    records = [
        _record(key, triples, sorted(taking_part[key]), mean_steps) for key, triples in seen.items()
    ]
    return tuple(sorted(records, key=lambda one: -(one.inside_ns + one.between_ns)))


def _record(
    key: tuple[str, str | None, int, int, int],
    triples: list[_Triple],
    ranks: list[int],
    steps: float,
) -> HierarchicalAllReduce:
    """Times are means over the ranks, per step."""
    reduce, gather, size, near, far = key
    per_step = max(1.0, steps * len(ranks))
    inside = sum(_length(t.inside) + (_length(t.spread) if t.spread else 0) for t in triples)
    between = sum(_length(t.between) for t in triples)
    return HierarchicalAllReduce(
        ranks=tuple(ranks),
        hosts=far,
        ranks_per_host=near,
        reduce=reduce,
        gather=gather,
        size_bytes=size,
        count=len(triples) / per_step,
        inside_ns=round(inside / per_step),
        between_ns=round(between / per_step),
    )


def _length(call: _Call) -> int:
    return call.end - call.start


def _triples(calls: CollectiveCalls, hosts: Mapping[int, str]) -> Iterable[_Triple]:
    near, far = (
        {
            place
            for place, group in enumerate(calls.groups)
            if (reach_of(group.ranks, len(group.ranks), hosts) if len(group.ranks) > 1 else None)
            == reach
        }
        for reach in ("inside host", "between hosts")
    )
    if not near or not far:
        return
    by_step: dict[int, list[_Call]] = defaultdict(list)
    for place in np.argsort(calls.start_ns, kind="stable").tolist():
        step = int(calls.step[place])
        if step >= 0 and int(calls.size_bytes[place]) > 0:
            by_step[step].append(
                _Call(
                    KINDS[int(calls.kind[place])],
                    int(calls.group[place]),
                    int(calls.size_bytes[place]),
                    int(calls.start_ns[place]),
                    int(calls.end_ns[place]),
                )
            )
    sizes = {place: len(calls.groups[place].ranks) for place in near}
    for in_step in by_step.values():
        yield from _join(in_step, near, far, sizes)


def _join(
    calls: list[_Call], near: set[int], far: set[int], sizes: dict[int, int]
) -> Iterable[_Triple]:
    """Each first part with the next all-reduce of its bytes, and the next call that spreads it."""
    used: set[int] = set()
    for place, first in enumerate(calls):
        if first.kind not in _FIRST or first.group not in near:
            continue
        left = first.size / (sizes[first.group] if first.kind == "reduce_scatter" else 1)
        middle = _next(calls, place + 1, used, {"all_reduce"}, far, left)
        if middle is None:
            continue
        used.add(middle)
        last = _next(calls, middle + 1, used, {_FIRST[first.kind]}, {first.group}, first.size)
        if last is not None:
            used.add(last)
        yield _Triple(first, calls[middle], calls[last] if last is not None else None)


def _next(
    calls: list[_Call],
    start: int,
    used: set[int],
    kinds: set[str],
    groups: set[int],
    size: float,
) -> int | None:
    for place in range(start, len(calls)):
        call = calls[place]
        alike = abs(call.size - size) <= _ALIKE * size
        if place not in used and call.kind in kinds and call.group in groups and alike:
            return place
    return None
