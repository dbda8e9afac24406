"""The rules of a bench: which runs count, how sure the mean is, who runs when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stepscope.bench.catalogue import load
from stepscope.bench.results import BenchMachine, WorkloadResult
from stepscope.bench.rules import (
    broken_rules,
    in_turns,
    mean_step,
    reach_target,
    speedup,
)
from stepscope.bench.task import BenchTask
from stepscope.bench.workload import Target


def run_of(ms: float, steps: int = 20) -> np.ndarray:
    return np.full(steps, ms)


def test_five_runs_leave_out_the_fastest_and_the_slowest() -> None:
    step = mean_step([run_of(ms) for ms in (10.0, 11.0, 12.0, 5.0, 90.0)])
    assert step.ms == pytest.approx(11.0)
    assert step.low_ms < 11.0 < step.high_ms


def test_fewer_than_five_runs_all_count() -> None:
    assert mean_step([run_of(10.0), run_of(10.0), run_of(40.0)]).ms == pytest.approx(20.0)


def test_one_run_has_the_interval_of_its_steps() -> None:
    step = mean_step([np.array([10.0, 12.0] * 20)])
    assert step.ms == pytest.approx(11.0)
    assert 10.0 < step.low_ms <= 11.0 <= step.high_ms < 12.0


@pytest.mark.parametrize("runs", [5, 7, 10])
def test_the_interval_holds_the_true_mean_in_95_of_100_benches(runs: int) -> None:
    draw, hits = np.random.default_rng(runs), 0
    for _ in range(1000):
        step = mean_step([run_of(ms) for ms in draw.normal(100.0, 3.0, runs)])
        hits += step.low_ms <= 100.0 <= step.high_ms
    assert hits >= 930


def test_leaving_out_the_extremes_does_not_make_the_interval_narrower_than_the_runs_say() -> None:
    """The middle three alone would: they are alike by choice."""
    middle = np.array([99.0, 100.0, 101.0])
    alone = 4.303 * middle.std(ddof=1) / np.sqrt(3)
    step = mean_step([run_of(ms) for ms in (90.0, 99.0, 100.0, 101.0, 110.0)])
    assert step.high_ms - step.ms > alone


def test_runs_take_turns_and_each_round_goes_the_other_way() -> None:
    plain = BenchTask(workload=load("gpt2"), size="tiny")
    bf16 = BenchTask(workload=load("gpt2"), size="tiny", remedies=("bf16",))
    order = [(number, task is bf16) for number, task in in_turns([plain, bf16], 3)]
    assert order == [(1, False), (1, True), (2, True), (2, False), (3, False), (3, True)]


def test_a_speed_beside_plain_runs_cancels_what_both_share() -> None:
    """The machine became twice as slow in the second pair; the gain is 20% in each."""
    value, low, high = speedup([120.0, 240.0, 121.0], [100.0, 200.0, 100.0])
    assert value == pytest.approx(1.2, rel=0.01)
    assert low is not None
    assert high is not None
    assert 1.1 < low < 1.2 < high < 1.3


def test_one_pair_of_runs_has_no_interval() -> None:
    assert speedup([120.0], [100.0]) == (pytest.approx(1.2), None, None)


def made_row(runs: int, **changes: Any) -> WorkloadResult:
    return WorkloadResult(name="gpt2", size="tiny", runs_ms=(10.0,) * runs, **changes)


def test_few_runs_changed_settings_and_a_busy_machine_are_broken_rules() -> None:
    machine = BenchMachine(host="a", processor="b", cores=4, load=2.0)
    broken = broken_rules([made_row(5), made_row(1)], machine, changed=["batch=4"])
    assert [words.split(":")[0].split(". ")[0] for words in broken] == [
        "only 1 run of each workload, but a claim needs 5 (--runs)",
        "these are not the suite's own settings",
        "the machine was busy at the start",
    ]


def test_a_training_that_misses_its_target_has_no_speed_to_claim() -> None:
    row = made_row(5, remedies=("bf16",), target_reached=False)
    assert broken_rules([row], None) == (
        "the speed of gpt2+bf16 is not a claim, because it missed its target loss",
    )


@pytest.mark.parametrize("load", [0.1, None])
def test_a_bench_by_the_rules_breaks_none(load: float | None) -> None:
    machine = BenchMachine(host="a", processor="b", cores=4, load=load)
    failed = made_row(0, status="failed")
    assert broken_rules([made_row(5, target_reached=True), made_row(7), failed], machine) == ()


TARGET = Target(loss=1.0, steps=6, over=2)


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        pytest.param([5.0, 0.9, 1.3, 0.7, 0.5, 0.5], (True, 4, 1.0), id="mean of the last"),
        pytest.param([5.0] * 6 + [0.1] * 6, (False, None, None), id="too late"),
        pytest.param([5.0, 5.0, 5.0], (None, None, None), id="too short: open"),
        pytest.param([None, None, 0.5, None, 0.5, 0.5], (True, 6, 1.5), id="no number, later"),
        pytest.param([None] * 6, (False, None, None), id="no number"),
    ],
)
def test_a_target_is_reached_by(values: list[float | None], outcome: tuple[object, ...]) -> None:
    assert reach_target(values, TARGET, step_ms=250.0) == outcome
