"""Which steps count."""

from __future__ import annotations

import numpy as np

from stepscope.verify.steady import drift, warm_up


def steady(steps: int, seed: int = 0) -> np.ndarray:
    return 10 + 0.1 * np.random.default_rng(seed).standard_normal(steps)


def test_a_slow_beginning_is_left_out() -> None:
    steps = steady(200)
    steps[:15] *= 1.5
    assert warm_up(steps) == 15
    assert len(steps[warm_up(steps) :]) == 185


def test_a_fast_beginning_is_left_out_too() -> None:
    steps = steady(200)
    steps[:10] *= 0.5
    assert warm_up(steps) == 10


def test_of_steady_runs_next_to_nothing_is_left_out() -> None:
    left_out = [warm_up(steady(200, seed)) for seed in range(40)]
    assert sum(steps > 0 for steps in left_out) <= 2
    assert max(left_out) <= 5


def test_slow_steps_in_the_middle_are_kept() -> None:
    steps = steady(200)
    steps[60:90] *= 2
    assert warm_up(steps) == 0


def test_a_slow_first_half_is_a_drift_and_no_warm_up() -> None:
    steps = steady(200)
    steps[:100] *= 1.2
    assert warm_up(steps) == 0
    found = drift(steps)
    assert found is not None
    assert -0.18 < found < -0.15  # 1 / 1.2 is a sixth less


def test_a_steady_run_does_not_drift() -> None:
    assert drift(steady(400)) is None


def test_a_short_run_is_taken_as_it_is() -> None:
    steps = steady(39)
    steps[:5] *= 3
    assert warm_up(steps) == 0
    assert drift(steps) is None


def test_equal_steps_have_no_warm_up() -> None:
    assert warm_up(np.full(100, 7.0)) == 0
