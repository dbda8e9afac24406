"""Who is late over hundreds of steps: by hand, and in thousands of simulated runs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from stepscope.explain.job import lateness
from stepscope.explain.job.lateness import find_late, median_of_others

STEP = 30e6
HEALTHY_RUNS = 1000


def noise(
    rng: np.random.Generator, steps: int, ranks: int, *, share: float = 0.08, alike: float = 0.5
) -> np.ndarray:
    """Neighbouring steps are alike; one in fifty is far later than the rest, on any rank."""
    fresh = rng.normal(size=(steps + 50, ranks))
    for row in range(1, len(fresh)):
        fresh[row] = alike * fresh[row - 1] + np.sqrt(1 - alike**2) * fresh[row]
    tail = (rng.random((steps, ranks)) < 0.02) * rng.exponential(0.5, (steps, ranks))
    return STEP * (share * fresh[50:] + tail)


def named(found: lateness.Lateness | None) -> list[tuple[int, bool]]:
    assert found is not None
    return [(rank.place, rank.constant) for rank in found.late]


def test_a_rank_that_is_always_5_ms_late_costs_5_ms() -> None:
    arrival = np.tile([0.0, 1e5, 2e5, 5.1e6], (100, 1))
    found = find_late(arrival, STEP)
    assert found is not None
    (rank,) = found.late
    assert (rank.place, rank.constant) == (3, True)
    assert rank.excess_ns == pytest.approx(5e6)  # against the others' mean, 0.1 ms
    assert rank.cost_ns == pytest.approx(4.9e6)  # then the third rank is last
    assert rank.late.all()
    assert rank.p_value < 1e-6


def test_a_rank_that_is_late_in_1_step_of_20() -> None:
    rng = np.random.default_rng(1)
    arrival = rng.normal(0, 1e6, (200, 4))
    arrival[::20, 3] += 200e6
    found = find_late(arrival, STEP)
    assert found is not None
    (rank,) = found.late
    assert (rank.place, rank.constant) == (3, False)
    assert rank.late.sum() == 10
    assert rank.excess_ns == pytest.approx(200e6, rel=0.02)
    assert rank.cost_ns == pytest.approx(10e6, rel=0.05)
    assert found.wandering is None


def test_a_rank_late_in_both_ways_is_named_once_for_the_way_that_costs_more() -> None:
    rng = np.random.default_rng(5)
    arrival = rng.normal(0, 1e6, (200, 4))
    arrival[:, 3] += 2e6
    arrival[::20, 3] += 200e6
    assert named(find_late(arrival, STEP)) == [(3, False)]  # 200 ms in 1 of 20: 10 ms a step
    arrival[:, 3] += 20e6
    assert named(find_late(arrival, STEP)) == [(3, True)]


def test_lateness_that_wanders_accuses_nobody() -> None:
    rng = np.random.default_rng(2)
    arrival = rng.normal(0, 1e6, (240, 4))
    late = np.arange(0, 240, 12)
    arrival[late, np.arange(len(late)) % 4] += 100e6
    found = find_late(arrival, STEP)
    assert named(found) == []
    assert found is not None
    assert found.wandering is not None
    assert found.wandering.late.sum() == 20
    assert found.wandering.excess_ns == pytest.approx(100e6, rel=0.05)
    assert found.wandering.cost_ns == pytest.approx(100e6 / 12, rel=0.1)


def test_late_steps_in_a_row_are_one_episode() -> None:
    """A rank that something held up for a while is no rank that is late now and then."""
    rng = np.random.default_rng(3)
    arrival = rng.normal(0, 1e6, (300, 4))
    arrival[100:130, 2] += 100e6
    found = find_late(arrival, STEP)
    assert named(found) == []


def test_waiting_for_a_core_hides_no_straggler_and_makes_none() -> None:
    """Ranks share cores: who waits for one is late, by chance a different rank for a while."""
    rng = np.random.default_rng(4)
    waits = np.abs(np.repeat(rng.normal(0, 0.5 * STEP, (15, 4)), 20, axis=0))
    arrival = rng.normal(0, 0.05 * STEP, (300, 4)) + waits
    assert named(find_late(arrival, STEP, waits)) == []
    arrival[:, 1] += 0.10 * STEP
    arrival[:, 1] += waits.mean(axis=1) - waits[:, 1] + 0.05 * STEP  # late as it was, too
    waits[:, 1] = waits.mean(axis=1)
    assert named(find_late(arrival, STEP)) == []
    assert named(find_late(arrival, STEP, waits)) == [(1, True)]


def test_a_rank_whose_own_phases_are_longer_is_accused_only_if_it_is_late() -> None:
    rng = np.random.default_rng(12)
    arrival = rng.normal(0, 0.6 * STEP, (200, 4))
    own = rng.normal(0.3 * STEP, 0.01 * STEP, (200, 4))
    own[:, 2] += 0.1 * STEP
    early, late = arrival.copy(), arrival.copy()
    early[:, 2] -= 0.1 * STEP
    late[:, 2] += 0.15 * STEP
    assert named(find_late(late, STEP)) == []
    assert named(find_late(late, STEP, own_ns=own)) == [(2, True)]
    assert named(find_late(early, STEP, own_ns=own)) == []


def test_noise_that_makes_ranks_late_but_never_early_accuses_nobody() -> None:
    rng = np.random.default_rng(13)
    accused = 0
    for _ in range(200):
        arrival = noise(rng, 300, 16, share=0.1) + np.abs(noise(rng, 300, 16, share=0.3, alike=0.8))
        accused += bool(named(find_late(arrival, STEP)))
    assert accused <= 2


def test_phases_that_are_longer_for_want_of_a_core_accuse_nobody() -> None:
    rng = np.random.default_rng(14)
    waits = np.abs(rng.normal(0, 0.1 * STEP, (300, 4)))
    waits[:, 3] += 0.06 * STEP
    own = 0.3 * STEP + rng.normal(0, 0.01 * STEP, (300, 4)) + waits
    arrival = rng.normal(0, 0.4 * STEP, (300, 4)) + waits
    assert named(find_late(arrival, STEP, waits, own)) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_at_most_1_healthy_run_in_100_accuses_somebody(ranks: int) -> None:
    rng = np.random.default_rng(5)
    accused = sum(
        bool(named(find_late(noise(rng, 200, ranks, share=0.2, alike=0.7), STEP)))
        for _ in range(HEALTHY_RUNS)
    )
    assert accused <= HEALTHY_RUNS / 100


def test_healthy_runs_whose_noise_lasts_for_long_are_not_accused() -> None:
    """The ranks' places on the cores change only every few dozen steps."""
    rng = np.random.default_rng(6)
    accused = 0
    for _ in range(300):
        places = np.repeat(rng.normal(0, 0.1 * STEP, (12, 4)), 25, axis=0)
        accused += bool(named(find_late(noise(rng, 300, 4) + places, STEP)))
    assert accused <= 3


@pytest.mark.parametrize("ranks", [4, 16])
def test_a_rank_that_is_5_percent_late_is_found_in_200_steps(ranks: int) -> None:
    rng = np.random.default_rng(7)
    right = 0
    for _ in range(100):
        arrival = noise(rng, 200, ranks, share=0.05)
        arrival[:, 1] += 0.05 * STEP
        right += named(find_late(arrival, STEP)) == [(1, True)]
    assert right >= 95


def test_two_stragglers_among_many_ranks() -> None:
    rng = np.random.default_rng(8)
    arrival = noise(rng, 300, 16)
    arrival[:, [3, 9]] += 0.2 * STEP
    assert sorted(named(find_late(arrival, STEP))) == [(3, True), (9, True)]


def test_ranks_that_all_differ_accuse_nobody() -> None:
    """The latest rank is no further from the next than the others from each other."""
    arrival = np.tile([0.0, 3e6, 6e6, 9e6], (100, 1))
    assert named(find_late(arrival, STEP)) == []


def test_too_few_steps_or_ranks_say_nothing() -> None:
    assert find_late(np.zeros((59, 4)), STEP) is None
    assert find_late(np.zeros((100, 1)), STEP) is None
    assert find_late(np.zeros((100, 4)), 0.0) is None


def test_a_run_whose_every_other_step_is_late_has_no_exceptions() -> None:
    arrival = np.random.default_rng(9).normal(0, 1e5, (100, 4))
    arrival[::2, 1] += 50e6
    assert named(find_late(arrival, STEP)) != []
    assert {place for place, _ in named(find_late(arrival, STEP))} == {1}


def test_median_of_others_leaves_the_column_itself_out() -> None:
    values = np.random.default_rng(10).normal(size=(20, 5))
    expected = [[np.median(np.delete(row, place)) for place in range(5)] for row in values]
    assert median_of_others(values) == pytest.approx(np.array(expected))


@pytest.mark.parametrize("freedom", [5.0, 20.0, 69.0])
@pytest.mark.parametrize("t", [1.0, 2.5, 4.0])
def test_chance_agrees_with_scipy(t: float, freedom: float) -> None:
    assert lateness._p_value(t, freedom) == pytest.approx(stats.t.sf(t, freedom), rel=0.05)
    assert lateness._student(lateness._p_value(t, freedom), freedom) == pytest.approx(t)


def test_the_binomial_tail_agrees_with_scipy() -> None:
    assert lateness._binomial_tail(7, 20, 0.25) == pytest.approx(stats.binom.sf(6, 20, 0.25))
    many = lateness._binomial_tail(550, 2000, 0.25)
    assert many == pytest.approx(stats.binom.sf(549, 2000, 0.25), rel=0.1)
