"""The slow first steps of a short run are its warm-up, and no part of the mean step."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.explain.whole_run.steady import FEWEST, warm_up


def steps(*first: float, count: int = 18) -> np.ndarray:
    """Milliseconds, calm after the first ones."""
    calm = 14 + 0.1 * np.sin(np.arange(count - len(first)))
    return np.array([*first, *calm]) * 1e6


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ((27.0,), 1),
        ((90.0, 31.0, 16.0), 3),
        ((14.5,), 0),  # not by a tenth
        ((14.0, 27.0), 0),  # a later slow step is a stall
        ((27.0,) * 5, 0),  # more than a quarter of the run: a slow spell
    ],
)
def test_leading_slow_steps_of_a_short_run(first: tuple[float, ...], expected: int) -> None:
    assert warm_up(steps(*first)) == expected


def test_steps_that_differ_much_hide_no_warm_up() -> None:
    noisy = np.array([30.0, *(18 + 6 * np.sin(1.7 * np.arange(16)))])
    assert warm_up(noisy) == 0


def test_a_handful_of_steps_shows_nothing() -> None:
    assert warm_up(steps(90.0, count=7)) == 0
    assert warm_up(steps(90.0, count=8)) == 1


def test_long_runs_are_judged_by_groups() -> None:
    assert warm_up(steps(90.0, count=FEWEST)) == 0  # one step of a group does not move its median
    assert warm_up(steps(*[27.0] * 5, count=FEWEST)) == 5
