"""Levels and trends of step times over a run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stepscope.explain.findings.loop import slows_down
from stepscope.explain.whole_run.rank_run import explain_run
from stepscope.explain.whole_run.stalls import FEWEST, find_steady, warm_up
from stepscope.explain.whole_run.step_levels import (
    explain_by_inputs,
    find_level_changes,
    find_step_levels,
    find_trend,
    follows_memory,
    typical_levels,
)
from stepscope.records.rank import StepColumns
from stepscope.records.run import LevelChange

from .columns import columns

# Changes of level: found where they are, with an honest interval, and nowhere else.

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


# A change of level says what takes longer since.


def changed(*, data: float = 0.0, core: float = 0.0) -> StepColumns:
    """From step 200 of 400 on, steps take 15 ms longer: so much of it in the loader, and so much
    without a core."""
    later = np.where(np.arange(400) < 200, 0.0, 1.0)
    wall = 5 * np.exp(np.random.default_rng(0).normal(0, 0.02, 400)) + 15 * later
    return columns(wall, data=0.5 + data * later, cpu_wait_ns=core * later)


def test_each_phase_and_the_wait_for_a_core_are_compared() -> None:
    (change,) = explain_run(changed(data=15.0, core=2.0)).changes
    assert change.more_ms == pytest.approx(
        {"data": 15.0, "forward": 0.0, "core_wait": 2.0}, abs=0.1
    )


@pytest.mark.parametrize(
    ("steps", "words", "first"),
    [
        (changed(data=14.0), "14.0 ms of it waiting for data", "late-window"),
        (changed(core=12.0), "12.0 ms of it waiting for a core", "idle-machine"),
        (changed(), "20.0 ms instead of 5.00 ms, 15.0 ms of it in forward.", "late-window"),
    ],
)
def test_the_finding_names_what_most_of_the_change_is(
    steps: StepColumns, words: str, first: str
) -> None:
    finding = slows_down.judge(explain_run(steps))
    assert finding is not None
    assert words in finding.summary
    assert finding.remedies[0].id == first


# A drift is a drift: no change of level, no noise, and nothing that the inputs explain.


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


# The slow first steps of a short run are its warm-up, and no part of the mean step.


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
