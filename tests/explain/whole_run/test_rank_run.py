"""A rank's run: the mean step, its stalls with their causes, and what lies between epochs."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.explain.whole_run.rank_run import explain_run, measure_typical_step
from stepscope.explain.whole_run.stalls import find_steady, warm_up
from stepscope.records.run import STALL_CAUSES, RankRun, Stall
from stepscope.step.statistics import mean_interval

from .columns import columns, ns


def noisy(n: int, ms: float = 30.0, noise: float = 0.01, seed: int = 0) -> np.ndarray:
    return ms * np.exp(np.random.default_rng(seed).normal(0, noise, n))


def stall(run: RankRun, cause: str) -> Stall:
    return next(stall for stall in run.stalls if stall.cause == cause)


def test_the_mean_step_is_the_typical_step_and_its_stalls() -> None:
    wall, data, evaluation = noisy(400), np.full(400, 0.1), np.zeros(400)
    data[3::4] += 70
    evaluation[49::50] = 500
    run = explain_run(columns(wall + data + evaluation, data=data, evaluation=evaluation))
    assert run.times is not None
    assert stall(run, "data").cost_ms == pytest.approx(17.5, rel=0.02)
    assert (stall(run, "data").period, stall(run, "data").steps) == (4, 100)
    assert stall(run, "evaluation").cost_ms == pytest.approx(10, rel=0.02)
    assert stall(run, "evaluation").period == 50
    assert run.times.typical_ms == pytest.approx(30.1, rel=0.01)
    costs = sum(stall.cost_ms for stall in run.stalls)
    assert run.times.typical_ms + costs == pytest.approx(run.times.mean_ms, rel=1e-9)
    assert run.times.median_ms == pytest.approx(30.2, rel=0.02)


def test_evaluation_between_epochs_costs_time_but_is_no_part_of_a_step() -> None:
    wall, evaluation, gap = noisy(200), np.zeros(200), np.zeros(200)
    evaluation[49::50] = 300
    gap[49::50] = 340
    between = gap - evaluation
    steps = columns(wall + gap, evaluation=evaluation, between_epochs=between, epoch_gap_ns=gap)
    run = explain_run(steps)
    assert run.times is not None
    assert run.times.mean_ms == pytest.approx(wall.mean(), rel=1e-6)
    assert stall(run, "evaluation").between_epochs_ms == pytest.approx(6)
    assert stall(run, "evaluation").cost_ms == 0


def test_a_steady_run_has_no_stalls_and_says_how_much_steps_vary() -> None:
    run = explain_run(columns(noisy(500)))
    assert run.stalls == ()
    assert run.times is not None
    assert run.times.variation == pytest.approx(0.01, rel=0.2)
    assert run.times.low_ms <= 30 <= run.times.high_ms


def test_each_stalled_step_has_the_colour_of_its_main_cause() -> None:
    wall, pause = noisy(100), np.zeros(100)
    pause[40] = 60
    run = explain_run(columns(wall + pause, gc=pause))
    assert run.series is not None
    assert np.flatnonzero(run.series.cause >= 0).tolist() == [40]
    assert STALL_CAUSES[run.series.cause[40]] == "gc"


def test_allocator_retries_explain_all_of_a_stall() -> None:
    wall, retries = noisy(100), np.zeros(100)
    wall[60] += 200
    retries[60] = 1
    run = explain_run(columns(wall, retries=retries))
    assert [stall.cause for stall in run.stalls] == ["allocator"]


def test_a_wait_for_another_rank_is_given_from_outside() -> None:
    wall = noisy(100)
    wall[60] += 200
    waits = np.zeros(100)
    waits[60] = 190
    run = explain_run(columns(wall), waits={"collective": ns(waits)})
    assert stall(run, "collective").longest_ms == pytest.approx(190, rel=0.01)


def test_the_devices_time_is_the_step_where_it_is_known() -> None:
    steps = columns([10] * 5, device_ns=[25] * 5)
    run = explain_run(steps)
    assert run.times is not None
    assert run.times.mean_ms == 25


def test_warm_up_is_slower_than_what_follows() -> None:
    steady = noisy(200)
    assert warm_up(np.concatenate((noisy(10, ms=90), steady))) == 10
    assert warm_up(np.concatenate((noisy(40, ms=15), steady))) == 0  # it became slower later
    assert warm_up(steady) == 0


def test_steps_that_compile_first_are_warm_up_in_a_short_run_too() -> None:
    steps = columns([900, 800, 10, 10, 10, 90, 10], compile=[890, 790, 0, 0, 0, 80, 0])
    steady, count = find_steady(steps)
    assert count == 2
    assert steady.tolist() == [False] * 2 + [True] * 5


def test_a_run_of_windows_alone_has_no_steady_step() -> None:
    run = explain_run(columns([10, 10], window=[0, 1]))
    assert (run.times, run.stalls, run.steps) == (None, (), 2)


def test_one_step_is_a_run() -> None:
    run = explain_run(columns([10]))
    assert run.times is not None
    assert run.times.mean_ms == run.times.low_ms == run.times.high_ms == 10


def test_the_means_interval_covers_it_though_neighbours_are_alike() -> None:
    covered = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        slow = np.repeat(rng.normal(0, 1, 40), 10)
        low, high = mean_interval(30 + slow + rng.normal(0, 1, 400))
        covered += low <= 30 <= high
    assert covered >= 0.9 * 300


def test_the_typical_step_is_that_of_steps_without_stalls() -> None:
    wall, data = noisy(200), np.full(200, 1.0)
    data[::10] += 100
    steps = columns(wall + data, data=data)
    typical = measure_typical_step(steps, explain_run(steps))
    assert typical is not None
    assert typical.step_ns == pytest.approx(31e6, rel=0.01)
    assert typical.phases_ns["data"] == 1_000_000
    assert max(typical.steps_ns) > 100e6


def test_a_loader_that_half_of_the_steps_wait_for_makes_no_level() -> None:
    """At first two of four steps wait for 50 ms, later one for 120: the steps themselves stay."""
    wall, data = noisy(400, noise=0.1), np.full(400, 0.3)
    data[0:100:4] += 50
    data[1:100:4] += 50
    data[100::4] += 120
    run = explain_run(columns(wall + data, data=data))
    assert run.changes == ()
    assert stall(run, "data").cost_ms == pytest.approx(data.mean() - 0.3, rel=0.03)
    assert run.times is not None
    assert run.times.typical_ms == pytest.approx(30.3, rel=0.03)


def test_remainders_of_other_stalls_say_nothing_about_how_often_a_cause_stalls() -> None:
    wall, waited = noisy(400, ms=1.4), np.zeros(400)
    wall[19::20] += 80
    waited[3::7] = 8  # without a core, and a little longer than that
    wall[3::7] += 8.2
    unknown = stall(explain_run(columns(wall + 0, cpu_wait_ns=waited)), "unknown")
    assert (unknown.steps, unknown.period) == (20, 20)
    assert unknown.typical_ms == pytest.approx(80, rel=0.02)


def test_equal_stalls_all_count() -> None:
    wall, data = noisy(400), np.zeros(400)
    data[3::4] = np.linspace(50, 70, 100)
    assert stall(explain_run(columns(wall + data, data=data)), "data").steps == 100


def test_data_that_gets_slower_with_time_is_a_drift() -> None:
    data = np.linspace(4, 24, 300)
    run = explain_run(columns(noisy(300, ms=4.0) + data, data=data))
    assert run.trend is not None
    assert run.trend.growth == pytest.approx(20 / 8, rel=0.1)


def test_a_loader_that_gets_no_core_makes_no_stalls_for_data() -> None:
    wall, data, core = noisy(300, ms=8.0), np.full(300, 1.0), np.zeros(300)
    data[5::11] += 12
    core[5::11] = 12
    crowded = explain_run(columns(wall + data, data=data, cpu_wait_ns=core))
    assert crowded.stalls[0].cause == "operating_system"
    assert "data" not in [stall.cause for stall in crowded.stalls]
    asleep = explain_run(columns(wall + data, data=data, cpu_wait_ns=core / 4))
    assert asleep.stalls[0].cause == "data"
    assert asleep.stalls[0].cost_ms == pytest.approx(12 / 11, rel=0.05)


def test_last_steps_that_the_device_had_not_finished_do_not_count() -> None:
    """A few launches are a whole step, so the host is many steps ahead when the run ends."""
    wall = [23.0] * 10 + [2.0] * 8 + [11.0] + [22.0] * 3
    device = [22.3] * 10 + [-1e-6] * 12
    run = explain_run(columns(wall, device_ns=device))
    assert run.times is not None
    assert (run.times.mean_ms, run.times.steps) == (pytest.approx(22.3), 10)


def test_steps_whose_device_time_could_not_be_read_count_by_the_host() -> None:
    run = explain_run(columns([23.0] * 40, device_ns=[22.3] * 10 + [-1e-6] * 30))
    assert run.times is not None
    assert run.times.steps == 40
