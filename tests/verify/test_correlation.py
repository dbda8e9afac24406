"""How many steps say as much as one: checked by hand, against scipy and against known processes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import fft

from stepscope.verify.spread import _sum_of_correlations, correlation_times


def autoregressive(weight: float, rows: int, steps: int, seed: int = 0) -> np.ndarray:
    out = np.random.default_rng(seed).standard_normal((rows, steps))
    for step in range(1, steps):
        out[:, step] = weight * out[:, step - 1] + np.sqrt(1 - weight**2) * out[:, step]
    return out


@pytest.mark.parametrize(("weight", "steps"), [(0.0, 200), (0.5, 400), (0.9, 2000), (-0.3, 400)])
def test_tau_of_an_autoregression_is_right_on_average(weight: float, steps: int) -> None:
    tau, _ = correlation_times(autoregressive(weight, 400, steps))
    assert tau.mean() == pytest.approx((1 + weight) / (1 - weight), rel=0.1)


@pytest.mark.parametrize(("weight", "steps"), [(0.0, 200), (0.5, 1000)])
def test_tau_scatters_as_its_degrees_of_freedom_say(weight: float, steps: int) -> None:
    tau, freedom = correlation_times(autoregressive(weight, 1000, steps))
    assert tau.var() / tau.mean() ** 2 == pytest.approx(2 / freedom.mean(), rel=0.2)


def test_independent_values_use_a_fifth_of_the_two_thirds_power() -> None:
    _, freedom = correlation_times(autoregressive(0.0, 5, 1000))
    assert freedom.tolist() == [20] * 5  # 0.2 x 1000^(2/3)


def test_strongly_correlated_values_use_half_as_many() -> None:
    _, freedom = correlation_times(autoregressive(0.99, 5, 1000))
    assert freedom.tolist() == [10] * 5


def test_the_spectrum_is_scipys_cosine_transform() -> None:
    values = autoregressive(0.0, 1, 60)
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
