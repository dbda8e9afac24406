"""Which steps count."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.verify.steady import drift, steady_steps, warm_up, without_pauses


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


# Which steps of a trial count.


def test_the_first_five_steps_never_count() -> None:
    assert steady_steps([10.0] * 60).tolist() == [10.0] * 55


def test_a_short_trial_loses_a_quarter_at_most() -> None:
    assert len(steady_steps([10.0] * 12)) == 9
    assert len(steady_steps([])) == 0


def test_a_compilation_in_the_first_half_ends_the_start_up() -> None:
    steps = [10.0] * 60
    steps[0], steps[17] = 60_000.0, 4_000.0  # a second graph is compiled for another shape
    assert steady_steps(steps).tolist() == [10.0] * 42


def test_a_stall_that_comes_again_is_no_start_up() -> None:
    steps = np.full(60, 10.0)
    steps[7::8] = 100.0
    kept = steady_steps(steps)
    assert kept.tolist() == steps[5:].tolist()


def test_a_slow_warm_up_is_left_out() -> None:
    steps = [20.0] * 10 + [10.0, 10.1] * 25
    assert steady_steps(steps).max() == 10.1


def test_one_pause_of_the_machine_counts_as_the_next_longest_step() -> None:
    steps = [10.0] * 38 + [11.0, 310.0]
    assert without_pauses(steps).max() == 11.0
    assert len(without_pauses(steps)) == 40


def test_two_pauses_from_fifty_steps_on() -> None:
    steps = [10.0] * 48 + [300.0, 310.0]
    assert without_pauses(steps).max() == 10.0
    assert without_pauses(steps[1:]).max() == 300.0


def test_stalls_of_a_loader_keep_their_length() -> None:
    """Every fourth step takes 50 ms: the mean is 20, and stays so."""
    steps = [10.0, 10.0, 10.0, 50.0] * 12
    assert without_pauses(steps).mean() == pytest.approx(20.0)
