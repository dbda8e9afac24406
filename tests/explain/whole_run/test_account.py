"""The account adds up to the command's wall time, whatever was captured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.explain.whole_run.account import account_for, mean_account
from stepscope.records.run import ACCOUNT, AccountPart, RunAccount, RunTimes

from .columns import MS, columns


def times(began_ms: float, ended_ms: float, **others: Any) -> RunTimes:
    return RunTimes(began_ns=round(began_ms * MS), ended_ns=round(ended_ms * MS), **others)


def ms(parts: tuple[AccountPart, ...]) -> dict[str, float]:
    return {part.id: part.ms for part in parts if part.ms}


def part(account: RunAccount, name: str) -> AccountPart:
    return next(part for part in account.parts if part.id == name)


def test_every_millisecond_of_a_command_has_its_place() -> None:
    """Starts at 0; our code is loaded at 300. The first step takes until 1300: 200 imports, 50 of
    the process group, 150 of building, 100 for the first batch, 500 of training."""
    steps = columns(
        [1000, 30, 10, 40, 10, 70, 10],
        starts_ms=300,
        first=True,
        window=[3],
        ours_ms=25,
        data=[100, 2, 2, 2, 2, 2, 2],
        other=[400, 0, 0, 0, 0, 0, 0],
        evaluation=[0, 0, 0, 0, 0, 50, 0],
        checkpoint=[0, 0, 0, 0, 0, 8, 0],
    )
    known = times(0, 1600, imports_ns=200 * MS, group_ns=50 * MS, first_batch_ns=800 * MS)
    account = account_for(steps, 2, known)
    assert ms(account.parts) == {
        "start_up": 300 + 100 + 400,
        "first_steps": 500 + 30,
        "training": 10 + 10 + 12 + 10,
        "evaluation": 50,
        "checkpoint": 8,
        "windows": 40 + 25,
        "shut_down": 1600 - 300 - 1170 - 25,
    }
    assert ms(part(account, "start_up").parts) == {
        "launch": 300,
        "imports": 200,
        "process_group": 50,
        "build": 150,
        "first_batch": 100,
    }
    assert ms(part(account, "training").parts) == {"data": 8, "forward": 34}
    assert account.goodput == 42 / 1600
    assert account.wall_ms == sum(part.ms for part in account.parts)


def test_what_a_script_does_in_a_recorded_step_is_not_ours() -> None:
    steps = columns(
        [100, 10, 90, 80, 10, 70],
        starts_ms=0,
        first=True,
        window=[1, 2, 4, 5],
        compile=[60, 0, 80, 70, 0, 50],
        evaluation=[0, 0, 0, 0, 4, 0],
    )
    account = account_for(steps, 3, times(0, 360, first_batch_ns=1))
    sums = ms(account.parts)
    assert sums["windows"] == 10 + 10 + 6 + 20
    assert sums["evaluation"] == 4
    assert ms(part(account, "first_steps").parts)["compile"] == 60 + 80
    assert ms(part(account, "training").parts)["compile"] == 70 + 50
    assert account.wall_ms == sum(part.ms for part in account.parts)


def test_evaluation_after_the_last_step_is_no_shut_down() -> None:
    steps = columns([100, 10, 10], first=True)
    known = times(0, 500, first_batch_ns=1, after_last_ns={"evaluation": 300 * MS})
    account = account_for(steps, 0, known)
    assert ms(account.parts)["evaluation"] == 300
    assert ms(account.parts)["shut_down"] == 80


def test_a_command_without_steps_is_outside_any_step() -> None:
    assert ms(account_for(None, 0, times(0, 500)).parts) == {"outside": 500}


def test_a_missing_step_is_time_outside_any_step() -> None:
    steps = columns([100, 10, 10, 10], first=True)
    steps.end_unix_ns[2:] += 40 * MS
    assert ms(account_for(steps, 0, times(0, 180, first_batch_ns=1)).parts)["outside"] == 40


def test_a_clock_that_was_set_back_is_said_and_nothing_is_negative() -> None:
    steps = columns([100, 10, 10, 10], first=True)
    account = account_for(steps, 0, times(0, 60, first_batch_ns=1))
    assert any("clock" in note for note in account.notes)
    assert all(part.ms >= 0 for part in account.parts)
    assert sum(part.ms for part in account.parts) == account.wall_ms


@given(
    st.lists(st.floats(0.001, 1e4), min_size=1, max_size=30),
    st.floats(0, 1e5),
    st.floats(0, 1e6),
    st.integers(0, 30),
    st.lists(st.integers(0, 29), max_size=5),
)
def test_it_always_adds_up(
    walls: list[float], began: float, lasted: float, warm_up: int, window: list[int]
) -> None:
    data = [wall / 3 for wall in walls]
    steps = columns(walls, starts_ms=began, window=window, ours_ms=3, first=True, data=data)
    account = account_for(steps, warm_up, times(began, began + lasted))
    assert sum(round(part.ms * MS) for part in account.parts) == round(account.wall_ms * MS)
    for outer in account.parts:
        assert outer.ms >= 0
        if outer.parts:
            assert sum(p.ms for p in outer.parts) == pytest.approx(outer.ms, abs=1e-5)


def test_the_jobs_account_is_the_mean_of_its_ranks() -> None:
    steps = columns([100, 10, 10], first=True)
    slower = columns([140, 10, 10], first=True)
    both = mean_account(
        [account_for(s, 0, times(0, 200, first_batch_ns=1)) for s in (steps, slower)]
    )
    assert both is not None
    assert ms(both.parts) == {"first_steps": 120, "training": 20, "shut_down": 60}
    assert tuple(p.id for p in both.parts) == ACCOUNT
    assert both.goodput == pytest.approx(0.1)
    assert np.isclose(sum(p.share for p in both.parts), 1)
