"""A slow host told from a slow rank: by hand, and in thousands of simulated runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from stepscope.explain.findings.evidence import JobEvidence
from stepscope.explain.findings.jobs import straggler
from stepscope.explain.job.all_ranks import join_ranks
from stepscope.explain.job.hosts import HostColumns
from stepscope.explain.job.late_ranks import WholeRunLateness, decide, judge_whole_run
from stepscope.explain.job.lateness import StepMatrices, find_late_hosts
from stepscope.records.job import RankPart, Straggler, Stragglers
from stepscope.ui.topics.distributed import straggler_words

from .test_late_ranks import STEPS, _paced, meeting, parts, with_phase
from .test_lateness import HEALTHY_RUNS, STEP, noise

TWO = tuple(HostColumns(host=f"node{k}", columns=(2 * k, 2 * k + 1)) for k in range(2))
FOUR = tuple(HostColumns(host=f"node{k}", columns=(2 * k, 2 * k + 1)) for k in range(4))


def on_hosts(
    late_ms: dict[int, Any], hosts: int = 2, each: int = 2, *, error_ns: int = 20_000
) -> list[RankPart]:
    """Hosts whose clocks were compared at the beginning and the end, within this error."""
    ranks = parts(late_ms, ranks=hosts * each)
    first = ranks[0].run
    assert first is not None
    ends = {"start": int(first.arrival_ns[0]), "run": int(first.arrival_ns[-1])}
    return [
        replace(
            part,
            host=f"node{part.rank // each}",
            rounds=tuple(
                meeting(label, at_ns, error_ns if part.rank else 0) for label, at_ns in ends.items()
            ),
        )
        for part in ranks
    ]


def stragglers(ranks: list[RankPart]) -> Stragglers:
    found = judge_whole_run(ranks).stragglers
    assert found is not None
    return found


def told(ranks: list[RankPart]) -> list[tuple[str, str | None, int | None]]:
    return [(one.scope, one.host, one.rank) for one in stragglers(ranks).ranks]


def late_hosts(
    arrival: np.ndarray, hosts: tuple[HostColumns, ...], cpu_wait: np.ndarray | None = None
) -> list[str]:
    matrices = StepMatrices(arrival_ns=arrival, cpu_wait_ns=cpu_wait, own_ns=None)
    return [late.host.host for late in find_late_hosts(matrices, hosts, STEP)]


# By hand


def test_half_of_all_ranks_are_late_together() -> None:
    """Neither stands apart from the other, and their host does from the other host."""
    found = stragglers(on_hosts({2: 6.0, 3: 6.0}))
    (host,) = found.ranks
    assert (host.scope, host.host, host.rank, host.ranks) == ("host", "node1", None, (2, 3))
    assert (host.kind, host.cause, host.source) == ("constant", "compute", "every step")
    assert host.excess_ms == pytest.approx(6.0, rel=0.02)
    assert host.cost_ms == pytest.approx(6.0, rel=0.05)
    assert host.evidence[0].startswith("its 2 ranks arrive 6.0")


@pytest.mark.parametrize("hosts", [2, 4])
def test_a_slow_rank_is_no_slow_host(hosts: int) -> None:
    assert told(on_hosts({2: 6.0}, hosts)) == [("rank", "node1", 2)]


@pytest.mark.parametrize("hosts", [2, 4])
def test_a_slow_host_is_told_once(hosts: int) -> None:
    assert told(on_hosts({2: 6.0, 3: 5.0}, hosts)) == [("host", "node1", None)]


def test_a_slow_host_and_a_slow_rank_elsewhere_are_both_told() -> None:
    assert told(on_hosts({2: 6.0, 3: 6.0, 6: 9.0}, 4)) == [
        ("rank", "node3", 6),
        ("host", "node1", None),
    ]


def test_a_host_whose_second_rank_is_hardly_late_is_not_slow() -> None:
    assert told(on_hosts({2: 12.0, 3: 2.0})) == [("rank", "node1", 2)]


def test_the_only_rank_of_a_host_is_told_as_a_rank() -> None:
    found = stragglers(on_hosts({1: 6.0}, hosts=4, each=1))
    (rank,) = found.ranks
    assert (rank.scope, rank.rank, rank.host) == ("rank", 1, "node1")
    assert rank.evidence[-1] == "it is the only rank on node1"


def test_a_host_that_stalls_now_and_then() -> None:
    late = np.zeros(STEPS)
    late[5::20] = 200.0
    (host,) = stragglers(on_hosts({2: late, 3: late})).ranks
    assert (host.scope, host.host, host.kind, host.one_in) == ("host", "node1", "intermittent", 20)
    assert host.excess_ms == pytest.approx(200, rel=0.02)
    assert host.cost_ms == pytest.approx(10, rel=0.05)


def test_a_rank_that_stalls_now_and_then_is_no_host() -> None:
    late = np.zeros(STEPS)
    late[5::20] = 200.0
    assert told(on_hosts({3: late})) == [("rank", "node1", 3)]


def test_a_host_waits_for_its_data() -> None:
    late = {2: 6.0, 3: 6.0}
    ranks = [with_phase(part, "data", late.get(part.rank, 0.0)) for part in on_hosts(late)]
    (host,) = stragglers(ranks).ranks
    assert host.cause == "input"


def test_a_host_whose_clock_may_be_off_by_as_much_is_not_accused() -> None:
    """Ranks of one host share its clock, so an error of the clock looks like a slow host."""
    late = {2: 6.0, 3: 6.0}
    assert told(on_hosts(late, error_ns=1_000_000)) == [("host", "node1", None)]
    assert told(on_hosts(late, error_ns=4_000_000)) == []


def test_the_finding_names_the_host() -> None:
    job = join_ranks([_paced(part) for part in on_hosts({2: 6.0, 3: 6.0})])
    assert job.hosts == {0: "node0", 1: "node0", 2: "node1", 3: "node1"}
    finding = straggler.find(JobEvidence(job=replace(job, step_ms=30.0), strategies=()))
    assert finding is not None
    assert (finding.title, finding.rank) == ("Slow host", None)
    assert finding.summary.startswith("node1 is slow: its 2 ranks arrive 6.0")
    assert "node1 holds the others back: its 2 ranks are late by 6" in straggler_words(
        job.stragglers
    )


# A slow link beside late ranks


def slow_link(cost_ms: float) -> Straggler:
    return Straggler(
        rank=None,
        cause="link",
        scope="link",
        host="node1",
        link=("node1", "node0"),
        slowdown=8.0,
        cost_ms=cost_ms,
        steps=3,
        of=3,
        evidence=("the link from node1 to node0 sends 4.90 MB/s, the others 61.0 MB/s", "waits"),
    )


def test_a_rank_that_a_slow_link_makes_late_is_not_accused() -> None:
    whole = judge_whole_run(on_hosts({0: 3.0}))
    assert whole.stragglers is not None
    assert whole.stragglers.ranks
    window = Stragglers(verdict="none")
    assert [one.scope for one in decide(window, whole, [slow_link(40.0)]).ranks] == ["link"]
    both = decide(window, whole, [slow_link(1.0)]).ranks
    assert [one.scope for one in both] == ["rank", "link"]


def test_a_slow_link_is_found_where_no_rank_is_late() -> None:
    none = WholeRunLateness(stragglers=Stragglers(verdict="none"), clears=True)
    found = decide(Stragglers(verdict="none"), none, [slow_link(40.0)])
    assert (found.verdict, found.ranks) == ("found", (slow_link(40.0),))
    job = join_ranks([_paced(part) for part in on_hosts({})])
    finding = straggler.find(
        JobEvidence(job=replace(job, step_ms=80.0, stragglers=found), strategies=())
    )
    assert finding is not None
    assert finding.title == "Slow link"
    assert finding.summary.startswith(
        "The link from node1 to node0 sends 4.90 MB/s, the others 61.0 MB/s"
    )
    assert "The link from node1 to node0 holds the others back" in straggler_words(found)


# Simulated


@pytest.mark.few(1)
@pytest.mark.parametrize(("hosts", "ranks"), [(TWO, 4), (FOUR, 8)])
def test_at_most_1_healthy_run_in_100_accuses_a_host(
    hosts: tuple[HostColumns, ...], ranks: int
) -> None:
    rng = np.random.default_rng(31)
    accused = sum(
        bool(late_hosts(noise(rng, 200, ranks, share=0.2, alike=0.7), hosts))
        for _ in range(HEALTHY_RUNS)
    )
    assert accused <= HEALTHY_RUNS / 100


def test_hosts_whose_ranks_share_cores_are_not_accused() -> None:
    """Both ranks of a host wait for the same cores, for dozens of steps in a row."""
    rng = np.random.default_rng(32)
    accused = 0
    for _ in range(300):
        places = np.repeat(rng.normal(0, 0.1 * STEP, (12, 2)), 25, axis=0)
        arrival = noise(rng, 300, 4) + np.repeat(places, 2, axis=1)
        accused += bool(late_hosts(arrival, TWO))
    assert accused <= 3


@pytest.mark.parametrize(("hosts", "ranks"), [(TWO, 4), (FOUR, 8)])
def test_a_host_that_is_5_percent_late_is_found_in_200_steps(
    hosts: tuple[HostColumns, ...], ranks: int
) -> None:
    rng = np.random.default_rng(33)
    right = 0
    for _ in range(100):
        arrival = noise(rng, 200, ranks, share=0.05)
        arrival[:, [2, 3]] += 0.055 * STEP
        right += late_hosts(arrival, hosts) == ["node1"]
    assert right >= 95


@pytest.mark.parametrize(("hosts", "ranks"), [(TWO, 4), (FOUR, 8)])
def test_a_slow_rank_is_never_taken_for_its_host(
    hosts: tuple[HostColumns, ...], ranks: int
) -> None:
    rng = np.random.default_rng(34)
    wrong = 0
    for _ in range(300):
        arrival = noise(rng, 200, ranks, share=0.1)
        arrival[:, 2] += rng.uniform(0.1, 1.0) * STEP
        wrong += bool(late_hosts(arrival, hosts))
    assert wrong <= 3


def test_a_host_late_for_want_of_cores_is_slow_only_if_that_is_much() -> None:
    rng = np.random.default_rng(36)
    waits = np.abs(rng.normal(0, 0.02 * STEP, (300, 4)))
    for share, accused in ((0.08, []), (0.3, ["node1"])):
        extra = np.where(np.arange(4) >= 2, share * STEP, 0.0)
        arrival = rng.normal(0, 0.02 * STEP, (300, 4)) + waits + extra
        assert late_hosts(arrival, TWO, waits + extra) == accused
        assert late_hosts(arrival, TWO) == ["node1"]  # where that is not known


def test_waiting_for_a_core_hides_no_slow_host() -> None:
    rng = np.random.default_rng(35)
    waits = np.abs(np.repeat(rng.normal(0, 0.3 * STEP, (15, 4)), 20, axis=0))
    arrival = rng.normal(0, 0.05 * STEP, (300, 4)) + waits
    assert late_hosts(arrival, TWO, waits) == []
    arrival[:, [2, 3]] += 0.15 * STEP
    assert late_hosts(arrival, TWO, waits) == ["node1"]
