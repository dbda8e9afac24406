"""Changes of level: found where they are, with an honest interval, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stepscope.explain.whole_run.step_levels import find_level_changes, typical_levels
from stepscope.records.run import LevelChange

MS = 1e6
Logs = Callable[[np.random.Generator, int], np.ndarray]


def changes_of(logs: np.ndarray) -> tuple[LevelChange, ...]:
    return find_level_changes(30 * MS * np.exp(logs), np.arange(len(logs)))


def white(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.normal(0, 0.03, n)


def heavy_tails(rng: np.random.Generator, n: int) -> np.ndarray:
    return 0.03 * rng.standard_t(2, n)


def correlated(rng: np.random.Generator, n: int) -> np.ndarray:
    """Steps that stay off together for about five steps."""
    off, logs = 0.0, np.empty(n)
    for place, new in enumerate(rng.normal(0, 0.02, n)):
        logs[place] = off = 0.8 * off + new
    return logs


def every_fourth_stalls(rng: np.random.Generator, n: int) -> np.ndarray:
    return white(rng, n) + np.where(np.arange(n) % 4 == 3, 1.1, 0.0)


def some_stall(rng: np.random.Generator, n: int) -> np.ndarray:
    return white(rng, n) + np.where(rng.random(n) < 0.1, 1.1, 0.0)


def drifting(rng: np.random.Generator, n: int) -> np.ndarray:
    return white(rng, n) + np.linspace(0, 0.4, n)


@pytest.mark.parametrize("n", [30, 120, 500])
@pytest.mark.parametrize(
    "logs",
    [white, heavy_tails, every_fourth_stalls, some_stall, drifting],
    ids=lambda f: f.__name__,
)
def test_a_run_without_a_change_shows_none(logs: Logs, n: int) -> None:
    alarms = sum(bool(changes_of(logs(np.random.default_rng(seed), n))) for seed in range(60))
    assert alarms <= 2


def test_steps_that_are_slow_together_are_no_change() -> None:
    alarms = sum(bool(changes_of(correlated(np.random.default_rng(s), 500))) for s in range(60))
    assert alarms <= 2


@pytest.mark.parametrize(
    ("logs", "n", "at", "change"),
    [
        (white, 40, 20, 1.0),
        (white, 120, 60, 0.2),
        (white, 500, 300, 0.05),
        (white, 500, 485, 0.3),
        (white, 500, 15, 0.3),
        (every_fourth_stalls, 500, 300, 0.3),
        (some_stall, 500, 200, 0.15),
        (correlated, 1000, 400, 0.2),
    ],
)
def test_a_change_is_found_and_its_interval_holds_it(
    logs: Logs, n: int, at: int, change: float
) -> None:
    """The interval is one of 95%, and not wider than it must be."""
    held = seen = 0
    for seed in range(80):
        rows = logs(np.random.default_rng(1000 + seed), n)
        rows[at:] += np.log1p(change)
        near = [one for one in changes_of(rows) if abs(one.step - at) <= 30]
        seen += bool(near)
        held += bool(near) and near[0].low <= at <= near[0].high
        assert all(one.low <= one.step <= one.high for one in near)
    assert seen >= 72
    assert held >= 0.93 * seen


def test_a_clear_change_is_known_to_the_step() -> None:
    rows = white(np.random.default_rng(0), 500)
    rows[300:] += np.log(2)
    (change,) = changes_of(rows)
    assert (change.step, change.low, change.high) == (300, 300, 300)
    assert change.before_ms == pytest.approx(30, rel=0.02)
    assert change.after_ms == pytest.approx(60, rel=0.02)


def test_several_changes_and_a_short_slow_time_are_all_found() -> None:
    rows = np.random.default_rng(4).normal(0, 0.02, 3000)
    for start, end, up in ((500, 1000, 0.1), (1500, 1560, 0.2), (2000, 3000, 0.3)):
        rows[start:end] += up
    assert [change.step for change in changes_of(rows)] == pytest.approx(
        [500, 1000, 1500, 1560, 2000], abs=2
    )


def test_a_change_inside_a_drift_is_the_only_change() -> None:
    rows = drifting(np.random.default_rng(2), 2000)
    rows[1400:] += 0.5
    (change,) = changes_of(rows)
    assert change.step == pytest.approx(1400, abs=5)


def test_a_million_steps_with_five_changes() -> None:
    rows = np.random.default_rng(0).normal(0, 0.03, 1_000_000)
    for start, up in ((300_000, 0.1), (500_000, 0.3), (505_000, -0.3), (700_000, 0.1)):
        rows[start:] += up
    assert [change.step for change in changes_of(rows)] == pytest.approx(
        [300_000, 500_000, 505_000, 700_000], abs=5
    )


def test_a_short_or_constant_run_has_no_change() -> None:
    assert find_level_changes(np.array([]), np.array([], np.int64)) == ()
    assert find_level_changes(np.full(10, 5.0), np.arange(10)) == ()
    assert find_level_changes(np.full(1000, 3e7), np.arange(1000)) == ()


def test_a_change_is_named_by_the_steps_own_numbers() -> None:
    rows = 30 * MS * np.exp(white(np.random.default_rng(0), 200))
    rows[100:] *= 2
    numbers = np.arange(1000, 1400, 2)
    (change,) = find_level_changes(rows, numbers)
    assert change.step == 1200
    level = typical_levels(rows, numbers, (change,))
    assert level[99] == pytest.approx(30 * MS, rel=0.02)
    assert level[100] == pytest.approx(60 * MS, rel=0.02)


def test_typical_levels_follow_a_drift() -> None:
    rows = np.linspace(30, 39, 901) * MS
    level = typical_levels(rows, np.arange(901), (), per_step=0.01 * MS)
    assert level == pytest.approx(rows)


def test_a_noisier_second_level_begins_where_it_does_and_changes_stay_in_order() -> None:
    rng = np.random.default_rng(4)
    calm, busy = rng.normal(0, 0.05, 230), rng.normal(1.4, 0.5, 70)
    (change,) = changes_of(np.concatenate((calm, busy)))
    assert abs(change.step - 230) <= 10
    back = np.concatenate((calm, busy, rng.normal(0, 0.05, 100)))
    steps = [change.step for change in changes_of(back)]
    assert steps == sorted(steps)
    assert len(steps) == 2
