"""How far a run's median may be off: checked against what is known by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import fft, stats

from stepscope.verify.spread import (
    _below,
    _outermost,
    _sum_of_correlations,
    correlation_times,
    quantile,
    quantile_spread,
    resolution,
    student_quantile,
)


def autoregressions(weight: float, rows: int, steps: int, seed: int = 0) -> np.ndarray:
    out = np.random.default_rng(seed).standard_normal((rows, steps))
    for step in range(1, steps):
        out[:, step] = weight * out[:, step - 1] + np.sqrt(1 - weight**2) * out[:, step]
    return out


def autoregressive(weight: float, steps: int, seed: int = 0) -> np.ndarray:
    return autoregressions(weight, 1, steps, seed)[0]


def test_a_quantile_by_hand() -> None:
    ordered = np.array([10.0, 20.0, 40.0, 80.0])
    assert quantile(ordered, 0.5) == 30  # half-way between the second and the third
    assert quantile(ordered, 0.625) == 40  # the middle of the third quarter
    assert quantile(ordered, 0.0) == 10
    assert quantile(ordered, 1.0) == 80


def test_two_deviations_of_a_hundred_independent_steps_are_ten_steps_away() -> None:
    # the share below has a deviation of sqrt(1/4 / 100) = 0.05, so 1.96 of them are 9.8 steps: the
    # textbook's exact 95% interval goes from the 40th to the 61st
    values = np.random.default_rng(3).permutation(np.arange(1.0, 101.0))
    found = quantile_spread(values)
    off = 9.8 * found.deviation / 0.05
    assert found.value == 50.5
    assert found.at(0.0) == 50.5
    assert found.at(-1.96) == pytest.approx(50.5 - off, abs=2.5)
    assert found.at(1.96) == pytest.approx(50.5 + off, abs=2.5)


def test_independent_steps_count_fully() -> None:
    effective = [quantile_spread(autoregressive(0.0, 500, seed)).effective for seed in range(60)]
    assert np.median(effective) == pytest.approx(500, rel=0.15)


def test_steps_that_lean_on_each_other_count_less() -> None:
    # of a Gaussian autoregression with weight 0.9, tau of the signs is the sum of
    # (2/pi) asin(0.9^k) over all k, both ways: 13.1
    tau = 1 + 2 * sum(2 / np.pi * np.arcsin(0.9**k) for k in range(1, 400))
    found = quantile_spread(autoregressive(0.9, 50_000))
    assert found.steps / found.effective == pytest.approx(tau, rel=0.2)


def test_between_spells_the_median_may_be_anywhere_between_them() -> None:
    """Just over half of the steps are slow: the true median may as well be a fast one's."""
    noise = 0.01 * autoregressive(0.0, 400)
    slow = np.repeat([1, 0, 1, 0, 1, 0, 1, 0], [60, 50, 50, 45, 50, 50, 50, 45]) == 1
    found = quantile_spread(np.where(slow, 12.0, 10.0) + noise)
    assert found.value > 11.9
    assert found.at(-1.0) < 10.1


def test_outliers_do_not_widen_the_interval() -> None:
    values = 10 + 0.1 * autoregressive(0.0, 400)
    wild = values.copy()
    wild[::20] *= 1000
    before, after = quantile_spread(values), quantile_spread(wild)
    assert after.at(2) - after.at(-2) < 1.3 * (before.at(2) - before.at(-2))


def test_equal_steps_make_up_the_share() -> None:
    values = np.array([1.0, 2.0, 2.0, 2.0, 3.0])
    rows = _below(values, np.sort(values), np.array([0.5, 0.6]))
    assert rows[0].tolist() == [1, 0.5, 0.5, 0.5, 0]
    assert rows[1] == pytest.approx([1, 2 / 3, 2 / 3, 2 / 3, 0])  # three steps of five in all


def test_scores_never_fall_and_the_outer_share_counts() -> None:
    scores = np.array([-3.0, -1.0, -2.0, 0.0, 2.0, 1.0, 3.0])
    assert _outermost(scores).tolist() == [-3, -1, -1, 0, 1, 1, 3]


def test_rounded_steps_are_not_known_better_than_their_rounding() -> None:
    whole = quantile_spread(np.full(200, 28.0))
    assert whole.rounding == 1.0
    assert whole.at(-1.96) == pytest.approx(27.525, abs=0.001)  # 95% of the way to the mark's edge
    assert whole.at(1.96) == pytest.approx(28.475, abs=0.001)


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
    ends = [found.at(score) for score in (-30.0, -2.0, -0.5, 0.5, 2.0, 30.0)]
    assert min(ends) >= min(values) - reach
    assert max(ends) <= max(values) + reach
    assert (np.diff(ends) >= -1e-9).all()
    assert 1 <= found.effective <= 5 * len(values)
    assert 1 <= found.freedom(2.0) <= len(values)


# How many steps say as much as one: checked by hand, against scipy and against known processes.


@pytest.mark.parametrize(("weight", "steps"), [(0.0, 200), (0.5, 400), (0.9, 2000), (-0.3, 400)])
def test_tau_of_an_autoregression_is_right_on_average(weight: float, steps: int) -> None:
    tau, _ = correlation_times(autoregressions(weight, 400, steps))
    assert tau.mean() == pytest.approx((1 + weight) / (1 - weight), rel=0.1)


@pytest.mark.parametrize(("weight", "steps"), [(0.0, 200), (0.5, 1000)])
def test_tau_scatters_as_its_degrees_of_freedom_say(weight: float, steps: int) -> None:
    tau, freedom = correlation_times(autoregressions(weight, 1000, steps))
    assert tau.var() / tau.mean() ** 2 == pytest.approx(2 / freedom.mean(), rel=0.2)


def test_independent_values_use_a_fifth_of_the_two_thirds_power() -> None:
    _, freedom = correlation_times(autoregressions(0.0, 5, 1000))
    assert freedom.tolist() == [20] * 5  # 0.2 x 1000^(2/3)


def test_strongly_correlated_values_use_half_as_many() -> None:
    _, freedom = correlation_times(autoregressions(0.99, 5, 1000))
    assert freedom.tolist() == [10] * 5


def test_the_spectrum_is_scipys_cosine_transform() -> None:
    values = autoregressions(0.0, 1, 60)
    tau, freedom = correlation_times(values)
    centred = values[0] - values[0].mean()
    used = int(freedom[0])
    cosines = fft.dct(centred, type=2, norm="ortho")[1 : used + 1]
    lags = np.correlate(centred, centred, "full")[59:65]
    rough = _sum_of_correlations(lags[None], 60)[0]
    falls = 1 / (1 + (np.pi / 2 * np.arange(1, used + 1) * rough / 60) ** 2)
    assert tau[0] == pytest.approx((cosines**2).sum() / falls.sum() / centred.var())


def test_rough_tau_by_hand() -> None:
    # of a million values with correlations 1, 1/2, 1/4, 1/8, then -1/4 and 1/2: the last pair is
    # 1/4, the one before 3/8, the first 3/2; twice their sum less one is 13/4
    products = np.array([[1.0, 0.5, 0.25, 0.125, -0.25, 0.5]])
    assert _sum_of_correlations(products, 10**6)[0] == pytest.approx(3.25, rel=1e-4)
    # a pair below zero ends the sum
    products = np.array([[1.0, 0.5, -0.5, 0.25, 0.5, 0.5]])
    assert _sum_of_correlations(products, 10**6)[0] == pytest.approx(2.0, rel=1e-4)


def test_values_that_do_not_vary_count_fully() -> None:
    tau, _ = correlation_times(np.ones((2, 30)))
    assert tau.tolist() == [1, 1]


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=80))
def test_tau_is_always_within_its_bounds(signs: list[float]) -> None:
    tau, freedom = correlation_times(np.array([signs]))
    assert 0.2 <= tau[0] <= max(1.0, len(signs) / 2)
    assert 1 <= freedom[0] <= len(signs)


# Student's t, against scipy's.


@pytest.mark.parametrize("freedom", [1.0, 2.0, 3.5, 10.0, 200.0])
@pytest.mark.parametrize("level", [0.0025, 0.3, 0.5, 0.8, 0.975])
def test_students_distribution_is_scipys(freedom: float, level: float) -> None:
    expected = stats.t.ppf(level, freedom)
    assert student_quantile(freedom, level) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_many_degrees_of_freedom_are_as_good_as_the_normal_distribution() -> None:
    assert student_quantile(1e9, 0.975) == pytest.approx(1.96, abs=0.006)


def test_less_than_one_degree_of_freedom_is_one() -> None:
    assert student_quantile(0.3, 0.975) == student_quantile(1, 0.975)
