"""A drift is a drift: no change of level, no noise, and nothing that the inputs explain."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.explain.whole_run.step_levels import (
    explain_by_inputs,
    find_step_levels,
    find_trend,
    follows_memory,
)

MS = 1e6


def noisy(n: int, ms: float = 30.0, noise: float = 0.02, seed: int = 0) -> np.ndarray:
    return ms * MS * np.exp(np.random.default_rng(seed).normal(0, noise, n))


# Drift


@pytest.mark.parametrize("n", [100, 300, 2000])
def test_a_drift_is_found_with_its_interval_in_spite_of_stalls(n: int) -> None:
    held = 0
    for seed in range(60):
        steps = noisy(n, seed=seed) * np.linspace(1.0, 1.3, n)
        steps[np.random.default_rng(seed).random(n) < 0.05] *= 3
        trend = find_trend(steps)
        assert trend is not None
        held += trend.low <= 0.3 <= trend.high
    assert held >= 53


@pytest.mark.parametrize("n", [30, 300, 1000])
def test_noise_and_changes_of_level_are_no_drift(n: int) -> None:
    for seed in range(40):
        steps = noisy(n, seed=seed)
        assert find_trend(steps) is None
        late = np.where(np.arange(n) >= 0.7 * n, 1.3, 1.0)
        assert find_trend(steps * late) is None


def test_steps_that_are_slow_together_are_no_drift() -> None:
    alarms = 0
    for seed in range(60):
        off, logs = 0.0, np.empty(500)
        for place, new in enumerate(np.random.default_rng(seed).normal(0, 0.02, 500)):
            logs[place] = off = 0.9 * off + new
        alarms += find_trend(np.exp(logs)) is not None
    assert alarms <= 2


def test_a_drift_on_both_sides_of_a_change_is_one_drift() -> None:
    steps = noisy(2000) * np.linspace(1.0, 1.2, 2000)
    steps[1000:] += 20 * MS
    levels = find_step_levels(steps, np.arange(2000))
    assert len(levels.changes) == 1
    assert levels.trend is not None
    assert levels.trend.growth == pytest.approx(0.2, rel=0.1)
    assert np.median(np.abs(steps / levels.level - 1)) < 0.03


def test_slower_with_memory_is_told_from_slower_with_time() -> None:
    rng = np.random.default_rng(0)
    saw = (np.arange(1000) % 100) * 1e7 + np.arange(1000) * 1e6
    by_memory = noisy(1000) * (1 + 0.3 * saw / saw.max())
    by_time = noisy(1000) * np.linspace(1, 1.3, 1000)
    assert follows_memory(by_memory, saw) is True
    assert follows_memory(by_time, saw) is False
    assert follows_memory(by_time, np.arange(1000) * 1e6) is None
    seldom = np.where(rng.random(1000) < 0.01, saw, -1.0)
    assert follows_memory(by_memory, seldom) is None


# Inputs


def test_the_time_of_an_element_has_an_interval_that_holds_it() -> None:
    held = 0
    for seed in range(60):
        elements = np.random.default_rng(seed).integers(50, 500, 400).astype(float)
        steps = noisy(400, ms=1.0, noise=0.05, seed=seed) * (5 + 0.1 * elements)
        effect = explain_by_inputs(steps, elements)[0]
        assert effect is not None
        held += (effect.low_ms or 0) <= 0.1 <= (effect.high_ms or 0)
    assert held >= 53


def test_stalls_do_not_bend_the_line() -> None:
    elements = np.random.default_rng(1).integers(50, 500, 1000).astype(float)
    steps = (5 + 0.1 * elements) * noisy(1000, ms=1.0)
    steps[::4] += 70 * MS
    effect = explain_by_inputs(steps, elements)[0]
    assert effect is not None
    assert effect.per_element_ms == pytest.approx(0.1, rel=0.03)
    assert (effect.fewest, effect.most) == (elements.min(), elements.max())


def test_a_long_batch_is_expected_to_take_long() -> None:
    elements = np.where(np.random.default_rng(0).random(500) < 0.5, 128, 512)
    steps = (5 + 0.1 * elements) * noisy(500, ms=1.0)
    steps[40] += 100 * MS
    expected = explain_by_inputs(steps, elements.astype(float))[1]
    over = np.flatnonzero(steps > 1.15 * expected)
    assert over.tolist() == [40]


def test_time_that_grows_with_the_square_of_the_length_is_followed() -> None:
    elements = np.random.default_rng(0).integers(50, 500, 800).astype(float)
    steps = (5 + 0.0003 * elements**2) * noisy(800, ms=1.0)
    assert np.abs(steps / explain_by_inputs(steps, elements)[1] - 1).max() < 0.15


def test_inputs_that_explain_nothing_leave_the_median() -> None:
    elements = np.random.default_rng(0).integers(50, 500, 300).astype(float)
    steps = noisy(300)
    assert explain_by_inputs(steps, elements)[0] is None
    assert set(explain_by_inputs(steps, elements)[1]) == {float(np.median(steps))}
    assert explain_by_inputs(steps, np.zeros(300))[0] is None
    assert explain_by_inputs(steps, np.full(300, 64.0))[0] is None
    assert len(explain_by_inputs(np.array([]), np.array([]))[1]) == 0


def test_inputs_that_grow_are_no_drift_and_no_change() -> None:
    elements = np.linspace(50, 500, 1000).astype(np.int64)
    elements[600:] *= 2
    steps = (5 + 0.1 * elements) * noisy(1000, ms=1.0)
    levels = find_step_levels(steps, np.arange(1000), elements)
    assert levels.inputs is not None
    assert (levels.changes, levels.trend) == ((), None)


def test_a_change_shows_through_inputs_that_vary() -> None:
    elements = np.random.default_rng(0).integers(50, 500, 1000)
    steps = (5 + 0.1 * elements) * noisy(1000, ms=1.0)
    steps[600:] *= 2
    levels = find_step_levels(steps, np.arange(1000), elements)
    assert [change.step for change in levels.changes] == pytest.approx([600], abs=3)
    assert np.median(np.abs(steps / levels.level - 1)) < 0.05


def test_steps_without_a_known_size_are_expected_at_the_median() -> None:
    elements = np.random.default_rng(0).integers(50, 500, 400).astype(float)
    steps = (5 + 0.1 * elements) * noisy(400, ms=1.0)
    elements[:10] = 0
    assert set(explain_by_inputs(steps, elements)[1][:10]) == {float(np.median(steps))}


def test_a_run_without_steps_has_no_levels() -> None:
    levels = find_step_levels(np.array([]), np.array([], np.int64), np.array([], np.int64))
    assert (len(levels.level), levels.changes, levels.trend, levels.inputs) == (0, (), None, None)
