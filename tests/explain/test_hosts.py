"""Slow hosts, and links between hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stepscope.explain.job.hosts import (
    blame_links,
    columns_by_host,
    find_slow_links,
    list_host_links,
    ranks_by_host,
    reach_of,
)
from stepscope.explain.job.stragglers import find_stragglers
from stepscope.records.job import RankPart, Stragglers
from stepscope.records.rank_facts import HostLink, PeerTraffic, RankLinks

from .whole_run.calls import part_of

# Slow hosts in the recorded steps.

MS = 1_000_000
HOSTS = {0: "node0", 1: "node0", 2: "node1", 3: "node1"}


def judged(own_ms: list[float], hosts: dict[int, str] | None = None) -> Stragglers:
    rng = np.random.default_rng(3)
    own = (np.array(own_ms) * MS * rng.normal(1, 0.005, (12, len(own_ms)))).astype(np.int64)
    step = np.full_like(own, own.max())
    return find_stragglers(range(len(own_ms)), own, own * 0, step, hosts=hosts)


def test_a_slow_host_is_told_once() -> None:
    (host,) = judged([20, 20, 26, 26], HOSTS).ranks
    assert (host.scope, host.host, host.rank, host.ranks) == ("host", "node1", None, (2, 3))
    assert host.slowdown == pytest.approx(1.3, rel=0.01)
    assert host.cost_ms == pytest.approx(6, rel=0.03)


def test_a_slow_rank_keeps_its_entry_and_names_its_host() -> None:
    (rank,) = judged([20, 20, 26, 20], HOSTS).ranks
    assert (rank.scope, rank.host, rank.rank, rank.ranks) == ("rank", "node1", 2, ())


def test_ranks_that_are_slow_by_different_amounts_are_no_slow_host() -> None:
    found = judged([20, 20, 40, 21.5], HOSTS).ranks
    assert {one.scope for one in found} == {"rank"}


def test_a_slow_host_among_several() -> None:
    hosts = {rank: f"node{rank // 2}" for rank in range(8)}
    found = judged([20, 20, 26, 26, 20, 20, 20, 20], hosts).ranks
    assert [(one.scope, one.host) for one in found] == [("host", "node1")]


def test_without_hosts_ranks_are_compared_as_before() -> None:
    found = judged([20, 20, 26, 26]).ranks
    told = sorted((one.scope, one.rank or 0, one.host) for one in found)
    assert told == [("rank", 2, None), ("rank", 3, None)]


def test_even_hosts_accuse_nobody() -> None:
    assert judged([20, 20, 20, 20], HOSTS).verdict == "none"


# Links between hosts, from what the ranks' connections have sent; all figures by hand.

MB = 1_000_000


def traffic(peer: str, megabytes: int, busy_ms: int, **more: Any) -> PeerTraffic:
    local = more.pop("local", "10.0.0.9")
    sent = megabytes * MB
    return PeerTraffic(local=local, peer=peer, sent_bytes=sent, busy_us=busy_ms * 1000, **more)


def rank_on(host: str, rank: int, *peers: PeerTraffic, **more: Any) -> RankPart:
    address = f"10.0.0.{host[-1]}"
    links = RankLinks(addresses=[address], peers=list(peers), steps=[10, 110], **more)
    return part_of(rank, None, host=host, links=links)


def link(sender: str, receiver: str, mb_s: float, **more: Any) -> HostLink:
    usual = {"steady_bytes_s": mb_s * MB, "sent_bytes": 100 * MB, "needs_step_ns": 40 * MS}
    return HostLink(
        sender=sender,
        receiver=receiver,
        connections=1,
        rate_bytes_s=mb_s * MB,
        rtt_us=50,
        retransmitted=0,
        **{**usual, **more},
    )


def ring(*rates: float) -> list[HostLink]:
    hosts = len(rates)
    return [
        link(f"node{place}", f"node{(place + 1) % hosts}", rate) for place, rate in enumerate(rates)
    ]


# From connections to links


def test_a_links_rate_is_its_bytes_over_the_time_it_could_send() -> None:
    """300 MB in 2 + 1 s of which the receiver had no room for 0.5 s: 120 MB/s."""
    parts = [
        rank_on("n1", 0, traffic("10.0.0.2", 200, 2000, receiver_limited_us=500_000, rtt_us=80)),
        rank_on("n1", 1, traffic("10.0.0.2", 100, 1000, retransmitted=3, rtt_us=60)),
        rank_on("n2", 2),
    ]
    (only,) = list_host_links(parts)
    assert (only.sender, only.receiver, only.connections) == ("n1", "n2", 2)
    assert only.steady_bytes_s == pytest.approx(120 * MB)
    assert only.rate_bytes_s == pytest.approx(120 * MB)
    assert only.needs_step_ns == pytest.approx(15 * MS)  # 2 MB a step in 1.5 s / 200 MB; not 1 MB
    assert (only.rtt_us, only.retransmitted, only.sent_bytes) == (60, 3, 300 * MB)


def test_the_kernels_estimate_counts_where_it_is_higher() -> None:
    """Acknowledgements that queue behind other data keep a connection busy that has sent all."""
    parts = [
        rank_on("n1", 0, traffic("10.0.0.2", 100, 1000, delivery_bytes_s=700 * MB)),
        rank_on("n2", 1, traffic("10.0.0.1", 100, 1000, delivery_bytes_s=50 * MB)),
    ]
    slower, faster = list_host_links(parts)
    assert (slower.sender, slower.rate_bytes_s) == ("n2", pytest.approx(100 * MB))
    assert (faster.sender, faster.rate_bytes_s) == ("n1", pytest.approx(700 * MB))


def test_traffic_inside_a_host_and_to_strangers_is_no_link_between_hosts() -> None:
    inside = traffic("10.0.0.1", 900, 10)
    loopback = traffic("127.0.0.1", 900, 10)
    storage = traffic("192.168.7.7", 900, 10)
    parts = [rank_on("n1", 0, inside, loopback, storage), rank_on("n2", 1)]
    assert list_host_links(parts) == ()


def test_an_address_that_two_hosts_have_is_nobodys() -> None:
    parts = [rank_on("n1", 0), rank_on("x1", 1), rank_on("n2", 2, traffic("10.0.0.1", 100, 100))]
    assert list_host_links(parts) == ()


def test_ranks_without_a_host_or_links_say_nothing() -> None:
    assert list_host_links([part_of(0, None), part_of(1, None, host="n1")]) == ()


# Which link is slow


def test_of_two_hosts_the_slower_direction_is_slow() -> None:
    (slow,) = find_slow_links([link("node0", "node1", 61), link("node1", "node0", 4.9)])
    assert (slow.link.sender, slow.link.receiver) == ("node1", "node0")
    assert slow.slowdown == pytest.approx(61 / 4.9)


def test_even_links_accuse_nobody_however_slow_they_are() -> None:
    assert find_slow_links(ring(1, 1, 1, 1)) == []
    assert find_slow_links(ring(1, 1.8)) == []  # just over half


def test_one_link_alone_has_nothing_to_be_compared_with() -> None:
    assert find_slow_links(ring(5)[:1]) == []
    assert find_slow_links([]) == []


def test_links_that_carry_little_are_not_compared() -> None:
    """A store's answers are short: their rate is that of the latency."""
    chatter = link("node1", "node0", 0.1, sent_bytes=2 * MB)
    assert find_slow_links([*ring(60, 60, 60), chatter]) == []


def test_a_link_that_could_send_its_bytes_quickly_is_not_to_blame() -> None:
    """Rates of fast links are those of the processors at their ends. 1 ms does not explain 9 ms."""
    fast = link("node0", "node1", 4800, needs_step_ns=0.4 * MS)
    other = link("node1", "node0", 2000, needs_step_ns=1 * MS)
    assert blame_links([fast, other], [9 * MS] * 3, 40 * MS) == ()


# What it costs, and whose it is


def test_a_slow_link_costs_what_the_others_would_save() -> None:
    """50 ms of exposed transfers at a tenth of the others' rate: 45 ms of a step of 100 ms."""
    (slow,) = blame_links(ring(100, 10, 100, 100), [50 * MS, 50 * MS], 100 * MS)
    assert (slow.rank, slow.cause, slow.scope) == (None, "link", "link")
    assert (slow.host, slow.link) == ("node1", ("node1", "node2"))
    assert slow.slowdown == pytest.approx(10)
    assert slow.cost_ms == pytest.approx(45)
    assert slow.evidence[0] == "the link from node1 to node2 sends 10.0 MB/s, the others 100 MB/s"


def test_links_that_meet_in_one_host_are_that_hosts() -> None:
    (slow,) = blame_links(ring(20, 10, 100, 100), [50 * MS], 100 * MS)
    assert (slow.host, slow.link) == ("node1", ("node1", "node2"))
    assert "the link from node0 to node1 sends 20.0 MB/s" in slow.evidence[1]


def test_a_slow_link_that_costs_little_is_not_told() -> None:
    assert blame_links(ring(100, 10), [5 * MS], 100 * MS) == ()  # 4.5 ms: under 5%
    assert blame_links(ring(100, 10), [], 100 * MS) == ()
    assert blame_links(ring(100, 10), [0.0], 100 * MS) == ()


def test_a_link_that_is_mostly_idle_does_not_explain_the_wait() -> None:
    idle = link("node1", "node0", 10, needs_step_ns=20 * MS)
    assert blame_links([link("node0", "node1", 100), idle], [50 * MS], 100 * MS) == ()


def test_the_network_device_is_named_where_it_is_known() -> None:
    slow = link("node1", "node0", 10, device_bytes_s=125 * MB)
    (blamed,) = blame_links([link("node0", "node1", 100), slow], [50 * MS], 100 * MS)
    assert blamed.evidence[-1] == "that is 8.0% of what node1's network device can send"


# Hosts


def test_columns_by_host_need_every_rank() -> None:
    hosts = {0: "a", 1: "b", 2: "a", 3: "b"}
    found = columns_by_host([0, 1, 2, 3], hosts)
    assert [(one.host, one.columns) for one in found] == [("a", (0, 2)), ("b", (1, 3))]
    assert columns_by_host([0, 1, 4], hosts) == ()
    assert columns_by_host([0, 2], hosts) == ()  # one host
    assert ranks_by_host(hosts) == {"a": (0, 2), "b": (1, 3)}


def test_reach_is_known_only_with_the_whole_group() -> None:
    hosts = {0: "a", 1: "a", 2: "b"}
    assert reach_of([0, 1], 2, hosts) == "inside host"
    assert reach_of([0, 2], 2, hosts) == "between hosts"
    assert reach_of([0, 1], 4, hosts) is None  # the others may be anywhere
    assert reach_of([0, 2], 4, hosts) == "between hosts"
    assert reach_of([0, 1], None, hosts) is None
    assert reach_of([7], 1, hosts) is None
