"""The slow first steps of a short run are its warm-up, and no part of the mean step."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.explain.whole_run.stalls import FEWEST, find_steady, warm_up

from .columns import columns


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
        ((900.0, *[27.0] * 5), 1),  # before it, a step of seconds is no part of it
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


def test_long_runs_are_judged_by_groups_too() -> None:
    assert warm_up(steps(*[27.0] * 5, count=FEWEST)) == 5
    slightly = [14.0, 14.9, 14.8, 14.0, 14.9] * 2  # calm single steps between slow ones
    assert warm_up(steps(*slightly, count=100)) == 10


def test_one_first_step_of_seconds_does_not_weigh_on_the_mean_of_a_long_run() -> None:
    """After minutes of compiling, garbage of a second is found in a step that compiles nothing."""
    assert warm_up(steps(1900.0, count=FEWEST)) == 1
    steady, first = find_steady(columns([1900.0, *[20.0] * 999]))
    assert (first, np.count_nonzero(steady)) == (1, 999)


def test_a_step_without_a_backward_pass_is_none_where_most_have_one() -> None:
    """Its first half ended with the pass, so it has the optimizer alone: 4 ms of 74."""
    device_ms = [900.0, 4.0, *[74.0] * 12]
    backward = [600.0, 0.0, *[10.0] * 12]
    steady, first = find_steady(columns(device_ms, backward=backward, device_ns=device_ms))
    assert first == 2
    assert np.flatnonzero(steady).tolist() == list(range(2, 14))


def test_steps_of_a_graph_have_no_backward_pass_and_count() -> None:
    steady, _ = find_steady(columns([20.0] * 10, backward=[15.0, *[0.0] * 9]))
    assert steady.all()


def test_the_step_after_one_of_our_own_waits_for_its_first_launches() -> None:
    """11 ms on the device, 13 where our step has emptied the queue."""
    wall = [11.0] * 12
    wall[6], wall[7] = 40.0, 13.0
    steps = columns(wall)
    steps.memory[6] = True
    steady, _ = find_steady(steps)
    assert np.flatnonzero(~steady).tolist() == [6, 7]
    assert steps.step_ns[steady].mean() == pytest.approx(11e6)
