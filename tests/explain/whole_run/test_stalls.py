"""Stalls of steps, and their periods."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.explain.whole_run.stalls import (
    find_period,
    find_periods,
    short_waits,
    split_stalls,
    without_waits,
)
from stepscope.explain.whole_run.step_levels import (
    explain_by_inputs,
    find_level_changes,
    find_trend,
    typical_levels,
)

# The mean step is the typical step and its stalls; every cause pays for its own.

MS = 1e6


def noisy(n: int, ms: float = 30.0, noise: float = 0.01, seed: int = 0) -> np.ndarray:
    return ms * MS * np.exp(np.random.default_rng(seed).normal(0, noise, n))


def test_every_fourth_step_that_waits_for_data_costs_a_quarter_of_its_wait() -> None:
    steps, data = noisy(400), np.full(400, 0.1 * MS)
    data[3::4] += 70 * MS
    steps[3::4] += 70 * MS
    split = split_stalls(steps, np.full(400, np.median(steps)), {"data": data})
    excess = split.excess_ns["data"]
    assert excess.mean() == pytest.approx(17.5 * MS, rel=0.02)
    assert np.count_nonzero(excess) == 100
    assert split.typical_ns == pytest.approx(30 * MS, rel=0.01)
    assert find_period(np.flatnonzero(excess)).steps == 4


def test_a_stall_that_nobody_measured_is_unknown() -> None:
    steps = noisy(200)
    steps[50] += 500 * MS
    split = split_stalls(steps, np.full(200, np.median(steps)), {"gc": np.zeros(200)})
    assert list(split.excess_ns) == ["unknown"]
    assert split.excess_ns["unknown"].mean() == pytest.approx(2.5 * MS, rel=0.02)


def test_a_wait_that_was_hidden_explains_no_more_than_the_step_took_longer() -> None:
    steps, data = noisy(100), np.zeros(100)
    data[10], steps[10] = 90 * MS, steps[10] + 60 * MS
    split = split_stalls(steps, np.full(100, np.median(steps)), {"data": data})
    assert list(split.excess_ns) == ["data"]
    assert split.excess_ns["data"][10] == pytest.approx(60 * MS, rel=0.05)


def test_a_measured_pause_is_not_lost_in_the_noise_of_a_shared_machine() -> None:
    steps, checkpoint = noisy(400, ms=15.0, noise=0.7), np.zeros(400)
    checkpoint[99::100] = 380 * MS
    level = np.full(400, np.median(steps))
    split = split_stalls(steps + checkpoint, level, {"checkpoint": checkpoint})
    assert split.excess_ns["checkpoint"].mean() == pytest.approx(3.8 * MS, rel=0.05)
    assert np.count_nonzero(split.excess_ns["checkpoint"]) == 4


def test_waits_that_do_not_stand_out_are_part_of_a_typical_step() -> None:
    steps = noisy(400, noise=0.3)
    data = 0.2 * steps  # all of it varies with the machine's load
    split = split_stalls(steps, np.full(400, np.median(steps)), {"data": data})
    assert split.excess_ns.get("data", np.zeros(1)).mean() < 0.002 * split.mean_ns


def test_collections_that_are_short_are_part_of_a_typical_step() -> None:
    steps, gc = noisy(400), np.zeros(400)
    gc[::7] = 1 * MS
    split = split_stalls(steps + gc, np.full(400, np.median(steps)), {"gc": gc})
    assert not split.excess_ns


def test_steps_that_vary_by_chance_have_no_stalls() -> None:
    for seed in range(20):
        steps = noisy(1000, noise=0.03, seed=seed)
        assert not split_stalls(steps, np.full(1000, np.median(steps)), {}).excess_ns


@given(
    st.lists(st.floats(1e3, 1e10), min_size=1, max_size=60),
    st.lists(st.floats(0, 1e10), min_size=60, max_size=60),
)
def test_the_mean_step_is_the_typical_step_and_all_stalls(
    times: list[float], waits: list[float]
) -> None:
    steps = np.array(times)
    level = np.full(len(steps), np.median(steps))
    split = split_stalls(steps, level, {"data": np.array(waits[: len(steps)])})
    parts = split.typical_ns + sum(excess.mean() for excess in split.excess_ns.values())
    assert parts == pytest.approx(split.mean_ns, rel=1e-9)
    assert all((excess >= 0).all() for excess in split.excess_ns.values())


def test_a_step_that_doubles_after_step_300_is_found_there() -> None:
    steps = np.concatenate((noisy(300), noisy(200, ms=60.0, seed=1)))
    steps[::50] += 400 * MS  # evaluation does not hide it
    numbers = np.arange(500)
    (change,) = find_level_changes(steps, numbers)
    assert change.step == 300
    assert change.low <= 300 <= change.high
    assert change.factor == pytest.approx(2.0, rel=0.02)
    assert typical_levels(steps, numbers, (change,))[299] == pytest.approx(30 * MS, rel=0.02)


def test_a_steady_run_has_no_change_of_level() -> None:
    assert (
        sum(
            bool(find_level_changes(noisy(500, noise=0.05, seed=s), np.arange(500)))
            for s in range(100)
        )
        <= 1
    )


def test_correlated_noise_is_no_change_of_level() -> None:
    alarms = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        noise = np.zeros(1000)
        for i in range(1, 1000):
            noise[i] = 0.8 * noise[i - 1] + rng.normal(0, 0.01)
        alarms += bool(find_level_changes(30 * MS * np.exp(noise), np.arange(1000)))
    assert alarms <= 5


def test_a_slow_growth_is_a_trend() -> None:
    steps = noisy(1000) * np.linspace(1.0, 1.3, 1000)
    trend = find_trend(steps)
    assert trend is not None
    assert trend.low <= 0.3 <= trend.high
    assert find_trend(noisy(1000)) is None


def test_steps_that_follow_their_inputs_are_explained_by_them() -> None:
    elements = np.random.default_rng(3).integers(50, 500, 300).astype(float)
    steps = 5 * MS + elements * 0.1 * MS + noisy(300, ms=1)
    effect = explain_by_inputs(steps, elements)[0]
    assert effect is not None
    assert effect.explained > 0.95
    assert effect.per_element_ms == pytest.approx(0.1, rel=0.02)
    assert explain_by_inputs(noisy(300), elements)[0] is None


def test_stalls_at_random_places_have_no_period() -> None:
    rng = np.random.default_rng(0)
    assert find_period(np.flatnonzero(rng.random(1000) < 0.1)) is None
    assert find_period(np.array([49, 99, 149, 199, 249])).steps == 50
    assert find_period(np.array([4, 5, 54, 55, 104, 154])).steps == 50


def test_on_the_host_a_wait_counts_in_full_though_the_step_was_quick_otherwise() -> None:
    """Steps vary by a third; every fourth waits for 40 ms more."""
    steps, data = noisy(400, noise=0.3), np.zeros(400)
    data[::4] = 40 * MS
    level = np.full(400, 30 * MS)
    split = split_stalls(steps + data, level, {"data": data}, hidden=False)
    assert split.excess_ns["data"].mean() == pytest.approx(10 * MS, rel=1e-9)
    calmer = noisy(400, noise=0.15)
    felt = split_stalls(calmer + data, level, {"data": data}, hidden=True)
    assert 9 * MS < felt.excess_ns["data"].mean() < 10 * MS


def test_a_wait_that_grows_is_a_drift_and_no_stall() -> None:
    data = np.linspace(4 * MS, 24 * MS, 300)
    assert np.allclose(without_waits(noisy(300, ms=4.0) + data, {"data": data}) - data, 4 * MS, 0.1)


def test_a_wait_that_begins_at_some_step_is_a_level_from_that_very_step() -> None:
    data = np.where(np.arange(600) < 330, 0.1 * MS, 20 * MS)
    level = without_waits(noisy(600, ms=10.0) + data, {"data": data})
    assert level[:330].max() < 11 * MS
    assert level[330:].min() > 29 * MS


def test_a_short_spell_of_waits_is_no_level() -> None:
    data = np.full(600, 0.1 * MS)
    data[300:330] = 20 * MS
    assert without_waits(noisy(600, ms=10.0) + data, {"data": data}).max() < 11 * MS


def test_short_waits_of_a_long_run_are_those_around_each_step() -> None:
    wait = np.where(np.arange(300_000) % 4 == 3, 70.0, np.linspace(0, 10, 300_000))
    assert np.allclose(short_waits(wait), np.linspace(0, 10, 300_000), atol=1.0)


# Periods of stalls: bursts, jitter, gaps, two at once, and none by chance.


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
