"""Means of steps that stall: how far apart they are, and how often chance is called a change."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from stepscope.verify.change import mean_difference, mean_ratio, mean_spread, mean_step
from stepscope.verify.compare import _decide, _median_step

Floats = NDArray[np.float64]


def stalling(
    rng: np.random.Generator,
    steps: int,
    *,
    often: float,
    ms: float = 50.0,
    tail: float | None = None,
) -> Floats:
    """Steps of 50 ms with 2% noise; some take longer, with a heavy tail if `tail` is given."""
    calm = 50.0 * np.exp(0.02 * rng.standard_normal(steps))
    longer = ms * (1 + rng.pareto(tail, steps)) if tail else np.full(steps, ms)
    return calm + np.where(rng.random(steps) < often, longer, 0.0)


def test_four_steps_by_hand() -> None:
    """Mean 3, variance 20 / 3: sqrt(20 / 3 / 4), made 8% longer for what is rare."""
    spread = mean_spread(np.array([1.0, 1.0, 3.0, 7.0]))
    assert spread.value == 3.0
    assert spread.deviation == pytest.approx(1.08 * math.sqrt(8.0 / 4))
    assert spread.freedom == 3


def test_the_ratio_is_that_of_the_means() -> None:
    a, b = np.array([10.0, 10.0, 40.0]), np.array([10.0, 10.0, 10.0])
    assert mean_ratio([a], [b]).value == pytest.approx(math.log(10 / 20))
    assert mean_difference([a], [b]).value == -10


def test_the_interval_turns_round_with_the_sides() -> None:
    rng = np.random.default_rng(1)
    a, b = (stalling(rng, 200, often=0.1) for _ in range(2))
    one, other = mean_ratio([a], [b]), mean_ratio([b], [a])
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))


def test_a_short_run_without_stalls_is_not_known_better_than_a_long_one_with_them() -> None:
    """Ten stalls in ten thousand steps: a run of 300 has none three times out of four."""
    rng = np.random.default_rng(2)
    short = stalling(rng, 300, often=0.0)
    long = stalling(rng, 10_000, often=0.0)
    long[::1000] += 2000
    found = mean_ratio([short], [long])
    assert found.low < 0 < found.high


def test_a_long_run_is_known_as_well_by_blocks_of_steps() -> None:
    """A tenth of 200,000 steps takes 50 ms longer: 50 x 0.3 / sqrt(200,000) of deviation."""
    rng = np.random.default_rng(4)
    values = stalling(rng, 200_001, often=0.1)
    spread = mean_spread(values)
    assert spread.value == pytest.approx(values.mean())
    assert spread.deviation == pytest.approx(1.08 * 15.0 / math.sqrt(200_000), rel=0.2)
    assert spread.effective == pytest.approx(200_000, rel=0.3)


def test_one_side_is_the_geometric_mean_of_its_runs_means() -> None:
    ms, low, high = mean_step([np.array([1.0, 3.0]), np.array([8.0, 8.0])])
    assert ms == pytest.approx(4.0)
    assert low < ms < high


def test_many_runs_are_compared_by_their_means() -> None:
    rng = np.random.default_rng(3)
    a = [stalling(rng, 300, often=0.25, ms=70) for _ in range(4)]
    b = [stalling(rng, 300, often=0.02, ms=70) for _ in range(4)]
    assert mean_ratio(a, b, paired=True).high < 0
    assert mean_ratio(a, b).high < 0


@pytest.mark.parametrize(
    ("often", "ms", "tail", "lengths"),
    [
        (0.25, 70.0, None, (300, 300)),
        (0.01, 200.0, None, (300, 300)),
        (0.05, 30.0, 2.5, (300, 300)),
        (0.02, 50.0, 1.5, (300, 300)),
        (0.02, 50.0, 1.5, (200, 2000)),
        (0.001, 500.0, None, (200, 2000)),
    ],
)
def test_same_against_same_says_no_difference_95_times_in_100(
    often: float, ms: float, tail: float | None, lengths: tuple[int, int]
) -> None:
    """Rare, long and heavy-tailed stalls; 400 pairs, whose share has a deviation of one percent."""
    rng = np.random.default_rng(7)
    silent = 0
    for _ in range(400):
        a, b = (stalling(rng, steps, often=often, ms=ms, tail=tail) for steps in lengths)
        found = mean_ratio([a], [b])
        silent += found.low <= 0 <= found.high
    assert silent >= 0.95 * 400 - 6


def test_half_as_many_stalls_are_found() -> None:
    """A quarter of the steps waits 70 ms, then an eighth: the mean falls by an eighth. Medians do
    not see it."""
    rng = np.random.default_rng(8)
    found = 0
    for _ in range(100):
        a, b = (stalling(rng, 500, often=often, ms=70) for often in (0.25, 0.125))
        found += mean_ratio([a], [b]).high < 0
    assert found >= 95


def test_three_percent_in_two_hundred_steps_of_two_percent_noise_is_found() -> None:
    rng = np.random.default_rng(9)
    found = 0
    for _ in range(200):
        a, b = (stalling(rng, 200, often=0.0) for _ in range(2))
        found += mean_ratio([a], [1.03 * b]).low > 0
    assert found == 200


def test_where_stalls_leave_the_mean_open_the_typical_step_decides() -> None:
    """Steps of 30 and 31 ms, 1% noise; a few stalls of seconds hide that in the mean."""
    rng = np.random.default_rng(5)
    a, b = (ms * np.exp(rng.normal(0, 0.01, 400)) for ms in (30.0, 31.0))
    for steps in (a, b):
        steps[rng.choice(400, 6, replace=False)] += rng.uniform(200, 3000, 6)
    ratio = mean_ratio([a], [b])
    assert ratio.low < 0 < ratio.high
    typical = _median_step([[a], [b]], paired=False, starts=0.0)
    assert typical.verdict == "slower"
    agrees = msgspec.structs.replace(ratio, value=0.02)
    assert _decide(agrees, typical) == "slower"
    assert _decide(msgspec.structs.replace(ratio, value=-0.02), typical) == "no difference seen"
    assert _decide(ratio, None) == "no difference seen"
