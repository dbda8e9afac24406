"""The links between hosts: how fast each sends, and which one is slower than the others.

A connection is busy while something waits to be sent or acknowledged, unless the receiver has no
room. Its bytes over that time are a rate that does not depend on how often the connection has
something to send: in a ring, all links move the same bytes in the same time, and only the slow one
is busy for all of it. Acknowledgements may queue behind the data of the other direction, so the
kernel's own estimate counts where it is higher.

A link is slow when it reaches less than half the median rate of the others, and needs, for its
bytes and at its rate, at least half of the time that ranks wait for transfers: the rates of fast
links are those of the processors at their ends. Links that are all alike accuse nobody, however
slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.records.figures import byte_rate, duration, percent
from stepscope.records.job import Straggler
from stepscope.records.links import HostLink

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stepscope.records.job import RankPart
    from stepscope.records.links import PeerTraffic

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
        rate_bytes_s=max(steady, float(np.median(estimates)) if estimates else 0.0),
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
        usual = float(np.median([other.rate_bytes_s for other in others]))
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
            *_against_device(worst.link),
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


def _against_device(link: HostLink) -> tuple[str, ...]:
    if not link.device_bytes_s:
        return ()
    share = percent(link.rate_bytes_s / link.device_bytes_s)
    return (f"that is {share} of what {link.sender}'s network device can send",)
