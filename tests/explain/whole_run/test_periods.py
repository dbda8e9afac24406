"""Periods of stalls: bursts, jitter, gaps, two at once, and none by chance."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.explain.whole_run.stalls import find_period, find_periods


def steps_of(*stretches: np.ndarray) -> np.ndarray:
    return np.unique(np.concatenate(stretches)).astype(np.int64)


@pytest.mark.parametrize("period", [2, 4, 8, 50, 1000])
def test_an_exact_period(period: int) -> None:
    found = find_period(np.arange(3, 3 + 20 * period, period))
    assert found is not None
    assert (found.steps, found.share) == (period, 1.0)


def test_a_burst_counts_from_where_it_begins() -> None:
    found = find_period(np.array([4, 5, 54, 55, 56, 104, 154]))
    assert found is not None
    assert found.steps == 50


def test_a_period_may_be_one_step_off() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        clock = find_period(np.arange(50, 2000, 50) + rng.integers(-1, 2, 39))
        drifts = find_period(np.cumsum(50 + rng.integers(-1, 2, 40)))
        assert clock is not None
        assert drifts is not None
        assert {clock.steps, drifts.steps} <= {49, 50, 51}


def test_a_stall_that_is_missing_does_not_hide_the_period() -> None:
    found = find_period(np.delete(np.arange(50, 3000, 50), [3, 9, 20, 21]))
    assert found is not None
    assert found.steps == 50


def test_two_periods_at_once() -> None:
    every_50, every_80 = np.arange(50, 3000, 50), np.arange(83, 3000, 80)
    assert [one.steps for one in find_periods(steps_of(every_50, every_80))] == [50, 80]
    between = np.arange(75, 3000, 100)
    assert [one.steps for one in find_periods(steps_of(every_50, between))] == [50, 100]


def test_a_period_that_holds_the_other_is_one_period() -> None:
    both = steps_of(np.arange(50, 3000, 50), np.arange(100, 3000, 100))
    assert [one.steps for one in find_periods(both)] == [50]


def test_a_period_among_some_other_stalls() -> None:
    others = np.random.default_rng(1).integers(0, 3000, 6)
    found = find_period(steps_of(np.arange(50, 3000, 50), others))
    assert found is not None
    assert found.steps == 50


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.25, 0.5])
@pytest.mark.parametrize("n", [200, 2000])
def test_stalls_by_chance_have_no_period(rate: float, n: int) -> None:
    alarms = sum(
        find_period(np.flatnonzero(np.random.default_rng(seed).random(n) < rate)) is not None
        for seed in range(100)
    )
    assert alarms <= 3


def test_too_few_stalls_have_no_period() -> None:
    assert find_period(np.array([], np.int64)) is None
    assert find_period(np.array([10, 20, 30])) is None


def test_spells_with_many_stalls_have_no_period() -> None:
    """A busy neighbour: half of the time most steps stall, and never in the other half."""
    false = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        is_busy = np.repeat(rng.random(10) < 0.5, 30)
        false += find_period(np.flatnonzero(is_busy & (rng.random(300) < 0.6))) is not None
    assert false <= 3


def test_steps_that_are_missing_do_not_double_the_period() -> None:
    numbers = np.array([19, 39, 99, 119, 139, 179, 199, 219, 239, 259, 279])
    assert find_period(numbers).steps == 20


def test_few_stalls_at_even_places_are_not_every_second_step() -> None:
    rng = np.random.default_rng(0)
    numbers = 2 * np.sort(rng.choice(94, 35, replace=False))
    assert find_period(numbers) is None
