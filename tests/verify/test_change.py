"""The change and its interval: exact where formulas are known, calibrated where they are not."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from stepscope.verify.change import (
    Estimate,
    median_difference,
    median_ratio,
    quantile_ratio,
    typical_step,
    widen_for_starts,
)
from stepscope.verify.steady import warm_up

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from series import correlated, drawn_again, independent, real_lists, spells, unseen_lists


def runs_at(*medians: float) -> list[np.ndarray]:
    """Three steps a run, the middle one as asked for."""
    return [np.array([median * 0.9, median, median * 1.1]) for median in medians]


def says_no_difference(found: Estimate) -> bool:
    return found.low <= 0 <= found.high


def test_runs_are_compared_as_students_t_does_with_one_variance() -> None:
    a, b = (10.0, 10.2, 9.9), (11.0, 11.3, 10.9, 11.1)
    found = median_ratio(runs_at(*a), runs_at(*b))
    expected = stats.ttest_ind(np.log(b), np.log(a)).confidence_interval(0.95)
    assert found.value == pytest.approx(np.log(b).mean() - np.log(a).mean())
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-4)


def test_pairs_are_compared_as_the_paired_t_does() -> None:
    a, b = (10.0, 12.0, 14.0), (10.5, 12.7, 14.6)
    found = median_ratio(runs_at(*a), runs_at(*b), paired=True)
    expected = stats.ttest_rel(np.log(b), np.log(a)).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-4)


def test_what_drifts_from_pair_to_pair_falls_out_of_pairs() -> None:
    a, b = (10.0, 12.0, 14.0), (10.5, 12.7, 14.6)
    paired = median_ratio(runs_at(*a), runs_at(*b), paired=True)
    unpaired = median_ratio(runs_at(*a), runs_at(*b))
    assert not says_no_difference(paired)
    assert says_no_difference(unpaired)


def test_a_few_steps_by_hand() -> None:
    # logs 0, 1, 2 and 10, 11, 12: variance 1, freedom 4, deviation 1.2 sqrt(2/3) = 0.98
    a, b = np.exp([0.0, 1.0, 2.0]), np.exp([10.0, 11.0, 12.0])
    found = median_ratio([a], [b])
    assert found.value == pytest.approx(10)
    assert found.high - found.value == pytest.approx(2.7764 * 1.2 * np.sqrt(2 / 3), rel=1e-3)


def test_runs_that_a_coarse_clock_makes_equal_are_not_known_exactly() -> None:
    a, b = [np.full(50, 28.0)] * 2, [np.full(50, 29.0)] * 2
    found = median_difference(a, b)
    assert found.value == 1.0
    assert found.low < 0.5


def test_starts_add_to_the_interval_as_deviations_do() -> None:
    found = widen_for_starts(Estimate(value=0.0, low=-0.03, high=0.03, smallest=0.04), 0.01)
    reach = 1.959964 * 0.01 * np.sqrt(2)
    assert found.high == pytest.approx(np.hypot(0.03, reach))
    assert found.low == -found.high
    assert widen_for_starts(found, 0.0) == found


def test_typical_step_is_the_geometric_mean_of_medians() -> None:
    ms, low, high = typical_step(runs_at(8.0, 18.0))
    assert ms == pytest.approx(12.0)
    assert low < 12 < high
    assert typical_step([np.array([5.0, 6.0, 7.0])])[0] == pytest.approx(6.0)


def test_the_interval_turns_round_with_the_sides() -> None:
    rng = np.random.default_rng(5)
    a, b = correlated(0.5)(rng, 2, 300)
    there, back = median_ratio([a], [b]), median_ratio([b], [a])
    assert there.value == pytest.approx(-back.value)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=1e-4)


def test_slow_steps_are_seen_where_medians_are_the_same() -> None:
    rng = np.random.default_rng(2)
    a, b = independent(rng, 2, 1000)
    b[rng.random(1000) < 0.1] *= 1.5
    assert says_no_difference(median_ratio([a], [b]))
    assert quantile_ratio([a], [b], 0.95).low > 0.1


@given(st.floats(0.5, 2.0), st.integers(0, 50))
def test_a_change_of_all_steps_moves_the_interval_by_just_that(factor: float, seed: int) -> None:
    a, b = correlated(0.5)(np.random.default_rng(seed), 2, 120)
    before, after = median_ratio([a], [b]), median_ratio([a], [b * factor])
    for name in ("value", "low", "high"):
        assert getattr(after, name) - getattr(before, name) == pytest.approx(
            np.log(factor), abs=1e-9
        )


# Calibration: benchmarks/comparison.py prints the whole table; these are seeded samples of it.


LISTS = real_lists() | unseen_lists()


def share_unchanged(a: np.ndarray, b: np.ndarray) -> float:
    same = [
        says_no_difference(median_ratio([x[warm_up(x) :]], [y[warm_up(y) :]]))
        for x, y in zip(a, b, strict=True)
    ]
    return float(np.mean(same))


def drawn_twice(name: str, comparisons: int) -> tuple[np.ndarray, np.ndarray]:
    make, rng = drawn_again(LISTS[name]), np.random.default_rng(11)
    steps = len(LISTS[name])
    return make(rng, comparisons, steps), make(rng, comparisons, steps)


def test_same_against_same_says_no_difference_95_times_in_100() -> None:
    found = [share_unchanged(*drawn_twice(name, 40)) for name in LISTS]
    assert len(found) >= 15
    assert 0.93 <= np.mean(found) <= 0.97
    assert min(found) >= 0.85  # three standard deviations of forty draws below 95%


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LISTS])
def test_each_real_list_five_hundred_times(name: str) -> None:
    assert 0.92 <= share_unchanged(*drawn_twice(name, 500)) <= 0.98


def test_a_quiet_run_against_a_noisy_one_says_no_difference_as_often() -> None:
    rng = np.random.default_rng(12)
    quiet, noisy = (np.exp(noise * rng.standard_normal((200, 200))) for noise in (0.002, 0.02))
    assert 0.9 <= share_unchanged(quiet, noisy) <= 0.98
    assert 0.9 <= share_unchanged(noisy, quiet) <= 0.98


def test_where_the_median_lies_between_slow_and_fast_spells_nothing_is_made_up() -> None:
    rng = np.random.default_rng(13)
    a, b = spells(25, 25)(rng, 200, 300), spells(25, 25)(rng, 200, 300)
    assert share_unchanged(a, b) >= 0.9  # a bootstrap says so in 80 of 100


def test_three_percent_in_two_hundred_steps_of_two_percent_noise_is_found() -> None:
    rng = np.random.default_rng(4)
    a, b = independent(rng, 100, 200), 1.03 * independent(rng, 100, 200)
    found = [
        median_ratio([x[warm_up(x) :]], [y[warm_up(y) :]]).low > 0
        for x, y in zip(a, b, strict=True)
    ]
    assert np.mean(found) >= 0.95


def test_the_smallest_detectable_change_is_found_four_times_in_five() -> None:
    rng = np.random.default_rng(6)
    a, b = independent(rng, 150, 200), independent(rng, 150, 200)
    smallest = np.median([median_ratio([x], [y]).smallest for x, y in zip(a, b, strict=True)])
    found = [median_ratio([x], [y * np.exp(smallest)]).low > 0 for x, y in zip(a, b, strict=True)]
    assert 0.7 <= np.mean(found) <= 0.9
