"""A run that ends soon after it began to train is not judged as if it were the whole training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from stepscope.explain.findings.compiled import compile_time
from stepscope.explain.findings.host import gc_pauses
from stepscope.explain.findings.loop import irregular_stalls, start_up
from stepscope.explain.whole_run.stalls import find_steady
from stepscope.records.compiled import CompiledWork
from stepscope.records.rank import StepColumns

from .runs import account, run, stall


def find_compiling(wall_s: float, compile_s: float, **seconds: float) -> Any:
    a_run = run(account=account(wall_s, **seconds))
    compiled = CompiledWork(compilations=2, compile_s=compile_s, cold_s=compile_s, cached_s=0.0)
    return compile_time.find(SimpleNamespace(run=a_run, compiled=compiled))  # type: ignore[arg-type]


def test_a_minute_of_start_up_before_a_second_of_training_is_low_and_says_why() -> None:
    found = start_up.judge(run(account=account(76.0, start_up=15.0, first_steps=60.0)))
    assert found is not None
    assert found.severity == "low"
    assert found.share == pytest.approx(75 / 76)  # still the share of this run
    assert found.evidence[-1] == (
        "this run trained for 1.00 s only; with an hour of training it would be 2.0% of the run"
    )


def test_a_start_up_of_half_an_hour_counts_in_a_trial_too() -> None:
    found = start_up.judge(run(account=account(1810.0, start_up=1800.0)))
    assert found is not None
    assert found.severity == "high"
    assert "33% of the run" in found.evidence[-1]


def test_a_run_that_trained_longer_than_it_started_is_judged_as_it_is() -> None:
    found = start_up.judge(run(account=account(300.0, start_up=90.0)))
    assert found is not None
    assert found.severity == "medium"
    assert len(found.evidence) == 1


def test_compiling_is_judged_in_the_same_way() -> None:
    trial = find_compiling(100.0, 80.0, first_steps=90.0)
    assert trial.severity == "low"
    assert trial.evidence[-1].startswith("this run trained for 10.0 s only")
    whole = find_compiling(400.0, 80.0, first_steps=90.0)
    assert whole.severity == "medium"
    assert not any("an hour" in line for line in whole.evidence)


@pytest.mark.parametrize(("rule", "cause"), [(gc_pauses, "gc"), (irregular_stalls, "unknown")])
def test_what_came_once_is_low_and_says_so(rule: Any, cause: Any) -> None:
    once = rule.judge(run(stall(cause, period=None, steps=1, share=0.3)))
    assert once.severity == "low"
    assert once.evidence[-1] == "it happened once: only a longer run shows whether it happens again"
    often = rule.judge(run(stall(cause, period=None, steps=2, share=0.3)))
    assert often.severity == "high"
    assert not any("once" in line for line in often.evidence)


def steps_with_window(count: int, window: range) -> StepColumns:
    """The step after the window takes ten times as long as the others."""
    number = np.arange(count)
    wall = np.full(count, 20_000_000)
    wall[window.stop] *= 10
    nothing = np.zeros(count, np.bool_)
    return StepColumns(
        number=number,
        wall_ns=wall,
        end_unix_ns=np.cumsum(wall),
        phases_ns={},
        window=np.isin(number, window),
        memory=nothing,
        whole=~nothing,
    )


def test_the_step_after_a_window_does_not_count() -> None:
    steady, warm_up = find_steady(steps_with_window(30, range(12, 15)))
    assert warm_up == 0
    assert np.flatnonzero(~steady).tolist() == [12, 13, 14, 15]


def test_it_counts_where_few_others_are_there() -> None:
    steady, _ = find_steady(steps_with_window(9, range(4, 6)))
    assert np.flatnonzero(~steady).tolist() == [4, 5]


def test_a_step_after_a_gap_in_the_numbers_counts() -> None:
    steps = steps_with_window(30, range(12, 15))
    later = steps.number.copy()
    later[15:] += 5  # lines between are missing
    assert find_steady(replace(steps, number=later))[0][15]
