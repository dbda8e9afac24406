"""Slow hosts in the recorded steps."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.explain.job.stragglers import find_stragglers
from stepscope.records.job import Stragglers

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
