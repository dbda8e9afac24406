"""The stragglers of a whole run, and what the window may still say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from stepscope.explain.findings.evidence import JobEvidence
from stepscope.explain.findings.jobs import straggler
from stepscope.explain.job.all_ranks import join_ranks
from stepscope.explain.job.late_ranks import WholeRunLateness, decide, judge_whole_run
from stepscope.records.job import RankPart, Rounds, Straggler, Stragglers
from stepscope.ui.topics.distributed import straggler_words

from .calls import part_of, run_of

MS = 1_000_000
STEPS = 200


def parts(late_ms: dict[int, Any], ranks: int = 4, **changes: Any) -> list[RankPart]:
    """A step takes 24 ms and what all wait for the last rank; noise of 0.2 ms."""
    rng = np.random.default_rng(0)
    latest = np.max([np.zeros(STEPS) + ms for ms in late_ms.values()] or [np.zeros(STEPS)], axis=0)
    changes = {"step_ns": ((24 + latest) * MS).astype(np.int64), **changes}
    runs = {
        rank: run_of(rng.normal(0, 0.2 * MS, STEPS) + late_ms.get(rank, 0.0) * MS)
        for rank in range(ranks)
    }
    return [part_of(rank, replace(run, **changes), host="one") for rank, run in runs.items()]


def with_phase(part: RankPart, phase: str, longer_ms: Any) -> RankPart:
    assert part.run is not None
    column = np.full(STEPS, 2 * MS) + (np.ones(STEPS) * longer_ms * MS).astype(np.int64)
    phases = {**part.run.phases_ns, phase: column}
    return replace(part, run=replace(part.run, phases_ns=phases))


def stragglers(ranks: list[RankPart]) -> Stragglers:
    found = judge_whole_run(ranks).stragglers
    assert found is not None
    return found


def test_a_rank_that_is_late_at_every_step() -> None:
    found = stragglers(parts({2: 6.0}))
    (rank,) = found.ranks
    assert (rank.rank, rank.kind, rank.cause, rank.one_in) == (2, "constant", "compute", None)
    assert rank.excess_ms == pytest.approx(6.0, rel=0.02)
    assert rank.cost_ms == pytest.approx(5.8, rel=0.03)  # the next one is late by noise
    assert rank.slowdown == pytest.approx(30 / 24, rel=0.03)  # the others wait 6 of 30 ms
    assert (rank.steps, rank.of, rank.source) == (STEPS, STEPS, "every step")


def test_the_cause_is_input_where_its_data_comes_as_late() -> None:
    ranks = [with_phase(part, "data", 6.0 * (part.rank == 2)) for part in parts({2: 6.0})]
    (rank,) = stragglers(ranks).ranks
    assert rank.cause == "input"
    assert rank.evidence[-1] == "100% of the extra time is waiting for data"


def test_the_phase_that_takes_longer_is_named() -> None:
    ranks = [with_phase(part, "checkpoint", 6.0 * (part.rank == 0)) for part in parts({0: 6.0})]
    (rank,) = stragglers(ranks).ranks
    assert rank.cause == "compute"
    assert "saving checkpoints takes 6.00 ms longer than on the others" in rank.evidence


def test_a_rank_that_is_late_in_1_step_of_20() -> None:
    late = np.zeros(STEPS)
    late[5::20] = 200.0
    found = stragglers(parts({3: late}))
    (rank,) = found.ranks
    assert (rank.rank, rank.kind, rank.one_in) == (3, "intermittent", 20)
    assert rank.excess_ms == pytest.approx(200, rel=0.01)
    assert rank.cost_ms == pytest.approx(10, rel=0.05)


def test_a_lateness_that_wanders_is_nobodys() -> None:
    late = {rank: np.zeros(STEPS) for rank in range(4)}
    for number, step in enumerate(range(0, STEPS, 10)):
        late[number % 4][step] = 100.0
    found = stragglers(parts(late))
    assert (found.verdict, found.ranks) == ("none", ())
    assert found.wandering is not None
    assert (found.wandering.rank, found.wandering.one_in) == (None, 10)
    assert "in 1 step of 10 some rank is 100 ms late, each time another one" in straggler_words(
        found
    )


@pytest.mark.parametrize(
    ("late", "says"),
    [
        (6.0, "Rank 2 is late by 6.0"),
        (np.where(np.arange(STEPS) % 20 == 5, 200.0, 0.0), "in 1 step of 20"),
    ],
)
def test_the_finding_says_how_often_and_by_how_much(late: Any, says: str) -> None:
    paced = [_paced(part) for part in parts({2: late})]
    job = replace(join_ranks(paced), step_ms=30.0)
    finding = straggler.find(JobEvidence(job=job, strategies=()))
    assert finding is not None
    assert says in finding.summary
    assert finding.rank == 2


def _paced(part: RankPart) -> RankPart:
    """Two recorded steps, in which no rank stands out."""
    number, dur = np.arange(2), np.full(2, 30 * MS)
    none = np.zeros(2, np.int64)
    pace = replace(
        part.pace,
        number=number,
        start_ns=number * 30 * MS,
        dur_ns=dur,
        compute_ns=dur,
        exposed_comm_ns=none,
        input_ns=none,
    )
    return replace(part, pace=pace)


# The window and the whole run


def accused(rank: int | None) -> Stragglers:
    one = Straggler(
        rank=rank,
        cause="compute" if rank is not None else "link",
        slowdown=1.5,
        cost_ms=9.0,
        steps=3,
        of=3,
    )
    return Stragglers(verdict="found", ranks=(one,))


def test_a_window_does_not_accuse_a_rank_that_200_steps_clear() -> None:
    whole = judge_whole_run(parts({}))
    assert whole.clears
    assert decide(accused(1), whole).verdict == "none"


def test_the_whole_run_names_another_rank_than_the_window() -> None:
    whole = judge_whole_run(parts({2: 6.0}))
    assert [rank.rank for rank in decide(accused(1), whole).ranks] == [2]


def test_only_the_window_shows_a_slow_link() -> None:
    whole = judge_whole_run(parts({}))
    assert decide(accused(None), whole).ranks[0].cause == "link"


def test_hosts_that_run_ahead_of_their_devices_clear_nobody() -> None:
    """With NCCL a rank arrives when its host launches, however far behind its device is."""
    whole = judge_whole_run(parts({}, on_host=False))
    assert decide(accused(1), whole) == accused(1)


def test_a_host_that_runs_ahead_is_late_only_where_steps_take_longer() -> None:
    late = np.where(np.arange(STEPS) % 20 == 5, 200.0, 0.0)
    assert stragglers(parts({2: 6.0}, on_host=False)).ranks == ()
    assert [one.rank for one in stragglers(parts({2: late}, on_host=False)).ranks] == [2]
    as_long = np.full(STEPS, 30 * MS)
    assert stragglers(parts({2: late}, on_host=False, step_ns=as_long)).ranks == ()
    assert judge_whole_run(parts({2: late}, on_host=False)).arrivals is None  # nobody waits


def test_ranks_of_different_groups_are_not_compared_by_their_work() -> None:
    """Stages of a pipeline: the last one works longer, and is late only by chance."""
    ranks = []
    for part in parts({3: 0.5}):
        assert part.run is not None
        backward = np.full(STEPS, 5 * MS)
        phases = {"forward": np.full(STEPS, (10 + 5 * (part.rank > 1)) * MS), "backward": backward}
        group = ("a",) if part.rank < 2 else ("b",)
        ranks.append(replace(part, run=replace(part.run, groups=group, phases_ns=phases)))
    assert stragglers(ranks).ranks == ()


def test_a_rank_without_a_log_is_not_cleared() -> None:
    ranks = parts({})
    whole = judge_whole_run([*ranks[:3], replace(ranks[3], run=None)])
    assert decide(accused(3), whole) == accused(3)


def test_without_logs_the_window_decides() -> None:
    assert judge_whole_run([part_of(rank, None) for rank in range(4)]) == WholeRunLateness()
    assert decide(accused(1), WholeRunLateness()) == accused(1)


# Clocks


def on_another_host(part: RankPart, ahead_ns: int, *, drift: float = 0.0) -> RankPart:
    """Its clock is ahead, and more so with time; it met rank 0 at the beginning and the end."""
    assert part.run is not None
    arrival = part.run.arrival_ns
    shifted = arrival + ahead_ns + ((arrival - arrival[0]) * drift).astype(np.int64)
    rounds = tuple(
        meeting(at, int(shifted[0 if at == "start" else -1]), 20_000) for at in ("start", "run")
    )
    return replace(part, host="two", run=replace(part.run, arrival_ns=shifted), rounds=rounds)


def meeting(label: str, at_ns: int, width_ns: int) -> Rounds:
    came = np.full(5, at_ns)
    return Rounds(label=label, step=None, came_ns=came - width_ns, left_ns=came + width_ns)


def test_clocks_that_drift_apart_are_followed() -> None:
    ranks = parts({1: 6.0}, ranks=4)
    first = ranks[0].run
    assert first is not None
    ends = (int(first.arrival_ns[0]), int(first.arrival_ns[-1]))
    rounds = tuple(meeting(label, at, 0) for label, at in zip(("start", "run"), ends, strict=True))
    moved = [replace(ranks[0], rounds=rounds), ranks[1]]
    moved += [on_another_host(part, 7_000_000_000, drift=1e-4) for part in ranks[2:]]
    (rank,) = stragglers(moved).ranks
    assert rank.rank == 1
    assert rank.excess_ms == pytest.approx(6.0, rel=0.1)


def test_a_host_that_no_meeting_connects_is_left_out() -> None:
    ranks = parts({1: 6.0})
    moved = [*ranks[:2], *(replace(part, host="two") for part in ranks[2:])]
    whole = judge_whole_run(moved)
    assert not whole.clears
    assert whole.arrivals is not None
    assert whole.arrivals.ranks == (0, 1)


def test_ranks_of_different_lengths() -> None:
    ranks = parts({})
    found = stragglers([ranks[0], replace(ranks[1], run=run_of(np.zeros(STEPS - 40))), ranks[2]])
    assert found.verdict == "none"
    assert "160 steps" in found.detail


def test_a_clock_that_was_set_accuses_nobody() -> None:
    """No rank waits for longer than its step took."""
    ranks = parts({})
    run = ranks[2].run
    assert run is not None
    arrival = run.arrival_ns.copy()
    arrival[120:] += 3_600_000_000_000  # an hour
    found = stragglers([*ranks[:2], replace(ranks[2], run=replace(run, arrival_ns=arrival))])
    assert found.verdict == "none"
    assert "120 steps" in found.detail
