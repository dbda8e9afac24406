"""Stacks in stalled steps against those in typical ones, with counts made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.explain.whole_run.stall_stacks import (
    StackCounts,
    add_stall_stacks,
    compare_stacks,
    find_places,
)
from stepscope.records.place import Place
from stepscope.records.stack_samples import StackSamples
from stepscope.records.whole_run import STALL_CAUSES, StepSeries

from .runs import run, stall

MAIN = Place(file="/home/u/train.py", line=10, function="main")
FORWARD = Place(file="/home/u/model.py", line=5, function="Model.forward")
LINEAR = Place(file="/usr/lib/python3/site-packages/torch/nn/linear.py", line=134, function="f")
SAVE = Place(file="/home/u/train.py", line=40, function="log_images")
WRITE = Place(file="/usr/lib/python3/site-packages/PIL/Image.py", line=7, function="save")
STACKS = ((MAIN, FORWARD, LINEAR), (MAIN, SAVE, WRITE), (MAIN, SAVE), (LINEAR,))


def counts(stalled: list[int], typical: list[int], steps: int = 10) -> StackCounts:
    """Ten stalled steps among ninety typical ones."""
    return StackCounts(
        stalled=np.array(stalled), typical=np.array(typical),
        stalled_steps=steps, typical_steps=90,
    )  # fmt: skip


def test_the_users_line_that_only_runs_in_stalled_steps_is_named() -> None:
    """Forward takes 3 samples in every step; the images take 6 more in a stalled one."""
    assert find_places(STACKS, counts([30, 50, 10, 0], [270, 0, 0, 0])) == (SAVE,)


def test_a_line_that_runs_as_much_in_typical_steps_explains_nothing() -> None:
    assert find_places(STACKS, counts([33, 0, 0, 0], [270, 0, 0, 0])) == ()


def test_few_samples_name_nothing() -> None:
    assert find_places(STACKS, counts([0, 3, 0, 0], [0, 0, 0, 0])) == ()


def test_a_library_is_named_only_where_no_line_of_the_user_is() -> None:
    assert find_places(STACKS, counts([0, 0, 0, 40], [0, 0, 0, 0])) == (LINEAR,)
    assert find_places(STACKS, counts([0, 20, 0, 40], [0, 0, 0, 0])) == (SAVE,)


def series(causes: dict[int, str], steps: int = 100, warm_up: int = 10) -> StepSeries:
    cause = np.full(steps, -1, np.int8)
    for place, name in causes.items():
        cause[place] = STALL_CAUSES.index(name)
    return StepSeries(
        number=np.arange(1, steps + 1), start_unix_ns=np.zeros(steps, np.int64),
        step_ns=np.where(cause >= 0, 4 * 10**7, 10**7), cause=cause, window=np.arange(steps) == 50,
        warm_up=warm_up,
    )  # fmt: skip


def test_samples_count_for_the_cause_of_their_step() -> None:
    """Steps 20, 40, 60 and 80 log; warm-up and window hold samples that must not count."""
    logs = series({19: "logging", 39: "logging", 59: "logging", 79: "logging"})
    number = np.concatenate((np.arange(1, 101), np.repeat([20, 40, 60, 80], 5), [51] * 9, [500]))
    stack = np.array([0] * 100 + [1] * 20 + [2] * 9 + [2])
    compared = compare_stacks(StackSamples(stacks=STACKS, number=number, stack=stack), logs)
    assert list(compared) == ["logging"]
    places, difference = compared["logging"]
    assert places == (SAVE,)
    assert (difference.stalled_steps, difference.typical_steps) == (4, 85)
    assert (difference.stalled_samples, difference.typical_samples) == (24, 85)
    assert (difference.stalled_ms, difference.typical_ms) == (40.0, 10.0)
    assert [(share.frames[1], share.stalled, share.typical) for share in difference.stacks] == [
        (FORWARD, pytest.approx(4 / 24), 1.0),
        (SAVE, pytest.approx(20 / 24), 0.0),
    ]


def test_a_stall_gets_the_lines_that_ran_in_it() -> None:
    number = np.concatenate((np.arange(1, 101), np.repeat([20, 40, 60, 80], 5)))
    samples = StackSamples(stacks=STACKS, number=number, stack=np.array([0] * 100 + [1] * 20))
    logs = series({19: "logging", 39: "logging", 59: "logging", 79: "logging"})
    after = add_stall_stacks(run(stall("logging"), stall("gc"), series=logs), samples)
    assert [one.where for one in after.stalls] == [(SAVE,), ()]
    assert [one.cause for one in after.stacks] == ["logging"]
    assert add_stall_stacks(run(stall("gc")), samples) == run(stall("gc"))


def test_a_run_without_steps_has_no_differences() -> None:
    nothing = series({}, steps=0, warm_up=0)
    assert compare_stacks(
        StackSamples(stacks=STACKS, number=np.array([1]), stack=np.array([0])), nothing
    ) == {}  # fmt: skip
