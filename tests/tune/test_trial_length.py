"""Trials of short steps make more of them."""

from __future__ import annotations

import numpy as np

from stepscope.ui.tune.trials import LEAST_MS, TrialLength, TrialRun


def ran(remedies: tuple[str, ...], step_ms: float, number: int = 1) -> TrialRun:
    return TrialRun(
        number=number, remedies=remedies, folder="x", took_s=1.0, step_ms=np.full(20, step_ms)
    )


def test_long_steps_are_as_many_as_were_asked_for() -> None:
    assert TrialLength(asked=30, baseline_ms=170.0).steps((), []) == 30


def test_short_steps_are_as_many_as_last_two_seconds() -> None:
    length = TrialLength(asked=30, baseline_ms=170.0)
    assert length.steps(("fast",), [ran(("fast",), 25.0)]) == LEAST_MS / 25 == 80


def test_but_never_more_than_five_times_as_many() -> None:
    assert TrialLength(asked=30, baseline_ms=0.1).steps((), []) == 150


def test_before_the_first_run_a_prediction_or_the_fastest_part_tells_the_pace() -> None:
    length = TrialLength(asked=30, baseline_ms=170.0, predicted_ms={frozenset(("a", "b")): 30.0})
    assert length.steps(("a", "b"), [ran((), 170.0)]) == 67
    assert length.steps(("a", "b", "c"), [ran((), 170.0), ran(("a", "b"), 50.0)]) == 40
    assert length.steps(("c",), [ran((), 170.0), ran(("a", "b"), 50.0)]) == 30


def test_a_slow_remedy_makes_as_many_steps_as_the_command_whose_losses_it_is_compared_with() -> (
    None
):
    length = TrialLength(asked=30, baseline_ms=30.0)
    assert length.steps((), []) == 67
    assert length.steps(("slow",), [ran(("slow",), 300.0)]) == 67


def test_trials_that_failed_tell_nothing() -> None:
    failed = TrialRun(number=1, remedies=("a",), folder="x", took_s=1.0, failed="exit code 1")
    assert TrialLength(asked=30, baseline_ms=170.0).steps(("a",), [failed]) == 30
