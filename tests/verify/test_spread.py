"""How far a run's median may be off: checked against scipy and against what is known by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import linalg, stats

from stepscope.verify.spread import (
    LEVELS,
    _autoregression,
    correlation_time,
    quantile_spread,
    resolution,
    student,
    student_quantile,
)


def ends(draws: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(low), float(high)


def autoregressive(weight: float, steps: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    out = rng.standard_normal(steps)
    for step in range(1, steps):
        out[step] = weight * out[step - 1] + np.sqrt(1 - weight**2) * out[step]
    return out


@pytest.mark.parametrize("freedom", [1.0, 2.0, 3.5, 10.0, 200.0])
def test_students_distribution_is_scipys(freedom: float) -> None:
    assert student(freedom) == pytest.approx(stats.t.ppf(LEVELS, freedom), rel=1e-4)
    expected = stats.t.ppf(0.975, freedom)
    assert student_quantile(freedom, 0.975) == pytest.approx(expected, rel=1e-4)


def test_many_degrees_of_freedom_are_as_good_as_the_normal_distribution() -> None:
    assert student_quantile(1e9, 0.975) == pytest.approx(1.96, abs=0.006)


def test_median_of_a_hundred_independent_steps_lies_between_the_40th_and_the_61st() -> None:
    # the textbook's exact 95% interval for a median of 100 values
    values = np.random.default_rng(3).permutation(np.arange(1.0, 101.0))
    found = quantile_spread(values)
    low, high = ends(found.draws)
    assert found.value == 50.5
    assert low == pytest.approx(40.3, abs=1.5)
    assert high == pytest.approx(60.7, abs=1.5)


def test_autoregression_solves_the_yule_walker_equations() -> None:
    lags = np.array([1.0, 0.6, 0.5, 0.3])
    order, weights, left = _autoregression(lags, n=10**6)  # so many values pay for any order
    expected = linalg.solve_toeplitz(lags[:3], lags[1:])
    assert order == 3
    assert weights == pytest.approx(expected)
    assert left == pytest.approx(1 - expected @ lags[1:])


def test_one_weight_by_hand() -> None:
    # rho = 1/2: the share left is 3/4, tau = (3/4) / (1 - 1/2)^2 = 3
    order, weights, left = _autoregression(np.array([1.0, 0.5]), n=1000)
    assert (order, weights.tolist(), left) == (1, [0.5], 0.75)


def test_independent_steps_count_fully() -> None:
    assert quantile_spread(autoregressive(0.0, 2000)).effective == pytest.approx(2000, rel=0.15)


def test_steps_that_lean_on_each_other_count_less() -> None:
    # of a Gaussian autoregression with weight 0.9, tau of the signs is the sum of
    # (2/pi) asin(0.9^k) over all k, both ways: 13.1
    tau = 1 + 2 * sum(2 / np.pi * np.arcsin(0.9**k) for k in range(1, 400))
    found = quantile_spread(autoregressive(0.9, 20_000))
    assert found.steps / found.effective == pytest.approx(tau, rel=0.2)


def test_outliers_do_not_widen_the_interval() -> None:
    values = 10 + 0.1 * autoregressive(0.0, 400)
    wild = values.copy()
    wild[::20] *= 1000
    before, after = ends(quantile_spread(values).draws), ends(quantile_spread(wild).draws)
    assert after[1] - after[0] < 1.3 * (before[1] - before[0])


def test_rounded_steps_are_not_known_better_than_their_rounding() -> None:
    whole = quantile_spread(np.full(200, 28.0))
    assert whole.rounding == 1.0
    low, high = ends(whole.draws)
    assert low == pytest.approx(27.5, abs=0.05)
    assert high == pytest.approx(28.5, abs=0.05)


def test_resolution_is_the_smallest_gap_where_most_values_have_an_equal() -> None:
    assert resolution(np.array([1.0, 1.0, 1.5, 1.5, 1.75, 1.75])) == 0.25
    assert resolution(np.array([1.0, 1.5, 1.75, 1.75])) == 0.0
    assert resolution(np.array([2.25, 2.25])) == pytest.approx(0.01)


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=60),
    st.floats(0.05, 0.95),
)
def test_every_list_has_a_finite_spread_within_its_range(values: list[float], level: float) -> None:
    found = quantile_spread(np.array(values), level)
    reach = found.rounding / 2 + 1e-9
    assert np.isfinite(found.draws).all()
    assert found.draws.min() >= min(values) - reach
    assert found.draws.max() <= max(values) + reach
    assert 1 <= found.effective <= 5 * len(values)


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=2, max_size=80))
def test_correlation_time_is_always_within_its_bounds(signs: list[float]) -> None:
    assert 0.2 <= correlation_time(np.array(signs)) <= max(1.0, len(signs) / 2)
