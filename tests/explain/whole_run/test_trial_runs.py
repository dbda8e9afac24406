"""A run that ends soon after it began to train is not judged as if it were the whole training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.explain.findings import compile_time, start_up
from stepscope.records.compiled import CompiledWork

from .runs import account, run


def find_compiling(wall_s: float, compile_s: float, **seconds: float) -> Any:
    a_run = run(account=account(wall_s, **seconds))
    compiled = CompiledWork(compilations=2, compile_s=compile_s, cold_s=compile_s, cached_s=0.0)
    return compile_time.find(SimpleNamespace(run=a_run, compiled=compiled))  # type: ignore[arg-type]


def test_a_minute_of_start_up_before_a_second_of_training_is_low_and_says_why() -> None:
    found = start_up.find_in(run(account=account(76.0, start_up=15.0, first_steps=60.0)))
    assert found is not None
    assert found.severity == "low"
    assert found.share == pytest.approx(75 / 76)  # still the share of this run
    assert found.evidence[-1] == (
        "this run trained for 1.00 s only; with an hour of training it would be 2.0% of the run"
    )


def test_a_start_up_of_half_an_hour_counts_in_a_trial_too() -> None:
    found = start_up.find_in(run(account=account(1810.0, start_up=1800.0)))
    assert found is not None
    assert found.severity == "high"
    assert "33% of the run" in found.evidence[-1]


def test_a_run_that_trained_longer_than_it_started_is_judged_as_it_is() -> None:
    found = start_up.find_in(run(account=account(300.0, start_up=90.0)))
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
