"""How much two starts of one command differ: each configuration by itself, and by its likes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stepscope.verify.tuned_gain import start_noise

A, B, C, D = ("a",), ("b",), ("c",), ("d",)


def test_all_configurations_are_pooled_by_hand() -> None:
    """Squares of successive differences, halved; 3 runs have 1.6 degrees of freedom, 2 have 1."""
    noise = start_noise({A: [0.0, 0.02, 0.0], B: [0.5, 0.54]})
    assert noise.freedom == pytest.approx(2.6)
    assert noise.deviation == pytest.approx(math.sqrt((1.6 * 0.0002 + 0.0008) / 2.6))


def test_it_has_a_floor_and_a_first_guess() -> None:
    assert start_noise({A: [1.0] * 4}).deviation == pytest.approx(0.003)
    assert start_noise({}).freedom == 0
    assert start_noise({}).deviation == 0.03


def test_a_steady_drift_is_no_noise() -> None:
    """Ten starts, each 1% slower: the standard deviation is 3%, the noise 0.7%."""
    noise = start_noise({A: [0.01 * number for number in range(10)]})
    assert noise.deviation == pytest.approx(0.01 / math.sqrt(2))


def test_likes_are_pooled_whoever_asks() -> None:
    logs = {A: [0.0, 0.02, 0.0, 0.02], B: [0.5, 0.52, 0.5], C: [0.3, 0.28, 0.3]}
    assert start_noise(logs, {A}) == start_noise(logs)


def made_up(deviations: dict[tuple[str, ...], float], runs: int, seed: int = 1) -> dict:
    draw = np.random.default_rng(seed)
    return {name: draw.normal(0, each, runs).tolist() for name, each in deviations.items()}


def test_a_quiet_configuration_is_not_judged_by_restless_ones() -> None:
    logs = made_up({A: 0.2, B: 0.15, C: 0.005, D: 0.004}, runs=8)
    quiet, restless = start_noise(logs, {C, D}), start_noise(logs, {A, B})
    assert quiet.deviation < 0.03
    assert 0.08 < restless.deviation < 0.3
    assert quiet.freedom < start_noise(logs).freedom


def test_two_configurations_cannot_show_how_unlike_they_are() -> None:
    logs = made_up({A: 0.2, C: 0.005}, runs=8)
    assert start_noise(logs, {C}) == start_noise(logs)


def test_one_that_never_ran_twice_is_taken_for_a_usual_one() -> None:
    logs = made_up({A: 0.2, B: 0.05, C: 0.005}, runs=8)
    unknown = start_noise(logs, {D})
    assert start_noise(logs, {C}).deviation < unknown.deviation < start_noise(logs, {A}).deviation


@pytest.mark.parametrize("seed", range(5))
def test_students_interval_holds_where_configurations_differ(seed: int) -> None:
    """The quiet one's deviation is right on average, whatever the others do."""
    logs = made_up({A: 0.1, B: 0.03, C: 0.01, D: 0.01}, runs=40, seed=seed)
    assert start_noise(logs, {C, D}).deviation == pytest.approx(0.01, rel=0.35)
