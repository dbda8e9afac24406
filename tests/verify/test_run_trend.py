"""Changes from run to run: found where they are, and seldom where there are none."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import mannwhitneyu, rankdata

from stepscope.verify import run_trend
from stepscope.verify.run_trend import FEWEST_RUNS, LEVEL, find_run_changes


def noisy(levels: list[float], runs: int, seed: int = 0, noise: float = 0.02) -> list[float]:
    random = np.random.default_rng(seed)
    steps = np.repeat(levels, runs) * np.exp(random.normal(0, noise, runs * len(levels)))
    return steps.tolist()


def test_a_change_is_found_at_its_run_with_its_size():
    (change,) = find_run_changes(noisy([100.0, 110.0], 12))
    assert change.at == 12
    assert change.change == pytest.approx(0.10, abs=0.03)
    assert change.low is not None
    assert change.high is not None
    assert change.low < change.change < change.high
    assert change.low > 0
    assert change.chance <= LEVEL
    assert change.before_ms == pytest.approx(100, rel=0.02)


def test_several_changes_are_found():
    changes = find_run_changes(noisy([100.0, 130.0, 90.0], 15))
    assert [change.at for change in changes] == [15, 30]
    assert [change.change > 0 for change in changes] == [True, False]


def test_series_without_a_change_seldom_show_one():
    """The promise is 1%: 5 of 100 or more have a chance of 1 in 300."""
    shown = sum(
        bool(find_run_changes(noisy([100.0], 25, seed=seed, noise=0.1))) for seed in range(100)
    )
    assert shown < 5


def test_heavy_tails_do_not_look_like_changes():
    random = np.random.default_rng(5)
    shown = 0
    for _ in range(60):
        steps = 100 * np.exp(0.02 * random.standard_cauchy(25).clip(-100, 100))
        shown += bool(find_run_changes(steps.tolist()))
    assert shown < 4


def test_one_odd_run_is_no_change():
    steps = noisy([100.0], 20)
    for at in (0, 10, 19):
        assert find_run_changes([*steps[:at], 400.0, *steps[at:]]) == ()


def test_few_runs_and_equal_runs_show_nothing():
    assert find_run_changes([]) == ()
    assert find_run_changes([10.0] * (FEWEST_RUNS - 1)) == ()
    assert find_run_changes([10.0, 10.0, 10.0, 20.0, 20.0, 20.0]) == ()
    assert find_run_changes([10.0] * 50) == ()


def test_of_very_many_runs_the_newest_count():
    steps = noisy([100.0, 120.0], 700)
    (change,) = find_run_changes(steps)
    assert change.at == 700


def test_ranks_and_interval_agree_with_scipy():
    random = np.random.default_rng(1)
    values = random.normal(size=40).round(1)
    assert run_trend._ranks(values) == pytest.approx(rankdata(values))
    before, after = random.normal(size=12), random.normal(0.5, 1, size=15)
    differences = np.sort((after[None] - before[:, None]).ravel())
    low, high = run_trend._interval(differences, 12, 15)
    assert low is not None
    assert high is not None
    # Just inside the interval the test does not reject, just outside it does.
    for shift, rejected in ((math.log1p(low) - 0.3, True), (math.log1p(low) + 0.05, False)):
        chance = mannwhitneyu(after - shift, before, method="asymptotic", use_continuity=False)
        assert bool(chance.pvalue < 0.05) is rejected


def test_chance_is_that_of_all_orders():
    """Of runs that are one of two values all orders can be tried."""
    values = np.array([1.0] * 7 + [2.0] * 3)
    ranks = run_trend._ranks(values)
    orders = itertools.combinations(range(10), 3)
    scores = [
        run_trend._scores(np.where(np.isin(np.arange(10), places), ranks[-1], ranks[0])[None]).max()
        for places in orders
    ]
    reached = run_trend._scores(run_trend._ranks(values)[None]).max()
    exact = np.mean(np.array(scores) >= reached - 1e-12)
    _, chance = run_trend._best_cut(values)
    assert chance == pytest.approx(exact, abs=0.012)
