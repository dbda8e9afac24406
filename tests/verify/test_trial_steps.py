"""Which steps of a trial count."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.verify.steady import steady_steps, without_pauses


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
