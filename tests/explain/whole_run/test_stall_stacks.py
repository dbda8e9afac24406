"""What sampled stacks say about stalls."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from stepscope.explain.whole_run.stall_stacks import (
    StackCounts,
    add_stall_stacks,
    compare_lines,
    compare_stacks,
    find_places,
    merge_differences,
)
from stepscope.records.run import STALL_CAUSES, LevelChange, StepSeries
from stepscope.records.source_lines import Place, StackDifference, StackSamples, StackShare

from .runs import run, stall

# Stacks in stalled steps against those in typical ones, with counts made by hand.

MAIN = Place(file="/home/u/train.py", line=10, function="main")
FORWARD = Place(file="/home/u/model.py", line=5, function="Model.forward")
LINEAR = Place(file="/usr/lib/python3/site-packages/torch/nn/linear.py", line=134, function="f")
SAVE = Place(file="/home/u/train.py", line=40, function="log_images")
WRITE = Place(file="/usr/lib/python3/site-packages/PIL/Image.py", line=7, function="save")
STACKS = ((MAIN, FORWARD, LINEAR), (MAIN, SAVE, WRITE), (MAIN, SAVE), (LINEAR,))


def counts(stalled: list[int], typical: list[int], steps: int = 10) -> StackCounts:
    """Ten stalled steps among ninety typical ones; every sample stands for 1 ms."""
    return StackCounts(
        stalled=np.array(stalled), typical=np.array(typical),
        stalled_steps=steps, typical_steps=90,
        stalled_ms=sum(stalled) / steps, typical_ms=sum(typical) / 90,
    )  # fmt: skip


def test_samples_that_come_more_often_in_one_kind_of_step_change_no_time() -> None:
    """Looked at ten times as often, typical steps of 3 ms still take 3 ms in forward."""
    few, many = counts([30, 50, 10, 0], [270, 0, 0, 0]), counts([30, 50, 10, 0], [2700, 0, 0, 0])
    assert find_places(STACKS, msgspec.structs.replace(many, typical_ms=3.0)) == (SAVE,)
    assert find_places(STACKS, few) == (SAVE,)


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


def test_a_rise_gets_the_lines_that_take_longer_since_then() -> None:
    """From step 51 on, images take half of every step; a level that falls has no such lines."""
    number = np.repeat(np.arange(1, 101), 4)
    stack = np.where((number > 51) & (np.arange(400) % 2 == 0), 1, 0)
    flat = series({})
    steps_ns = np.where(flat.number > 51, 2 * 10**7, 10**7)
    steps = msgspec.structs.replace(flat, step_ns=steps_ns, window=np.zeros(100, np.bool_))
    rise = LevelChange(step=52, low=52, high=52, before_ms=10.0, after_ms=20.0)
    fall = LevelChange(step=52, low=52, high=52, before_ms=20.0, after_ms=10.0)
    samples = StackSamples(stacks=STACKS, number=number, stack=stack)
    after = add_stall_stacks(run(series=steps, changes=(rise,)), samples)
    assert after.changes[0].where == (SAVE,)
    after = add_stall_stacks(run(series=steps, changes=(fall,)), samples)
    assert after.changes[0].where == ()


def test_a_run_without_steps_has_no_differences() -> None:
    nothing = series({}, steps=0, warm_up=0)
    assert compare_stacks(
        StackSamples(stacks=STACKS, number=np.array([1]), stack=np.array([0])), nothing
    ) == {}  # fmt: skip


# Times of lines in stalled steps against typical ones, with shares made by hand.

SAVING = Place(file="/home/u/train.py", line=41, function="log_images")

# Ten stalled steps of 200 ms with 100 samples, 90 typical ones of 50 ms with 225.
LOGGING = StackDifference(
    cause="logging",
    stalled_steps=10,
    typical_steps=90,
    stalled_samples=100,
    typical_samples=225,
    stalled_ms=200.0,
    typical_ms=50.0,
    stacks=(
        StackShare(frames=(MAIN, FORWARD), stalled=0.25, typical=0.96),
        StackShare(frames=(MAIN, SAVING, WRITE), stalled=0.70, typical=0.0),
        StackShare(frames=(MAIN, SAVING), stalled=0.05, typical=0.04),
    ),
)


def test_a_line_runs_longer_by_its_share_of_each_kind_of_step() -> None:
    """75% of 200 ms against 4% of 50 ms; forward takes about 50 ms in both."""
    (line,) = compare_lines(LOGGING)
    assert line.place == SAVING
    assert line.more_ms == pytest.approx(0.75 * 200 - 0.04 * 50)
    # The standard errors: 200 ms * sqrt(0.745 * 0.255 / 102) and 50 ms * sqrt(0.044 * 0.956 / 227).
    assert line.high_ms - line.more_ms == pytest.approx(1.96 * 8.66, rel=0.01)
    assert line.more_ms - line.low_ms == pytest.approx(line.high_ms - line.more_ms)


def test_a_line_never_runs_longer_than_the_step() -> None:
    whole = (StackShare(frames=(SAVING,), stalled=1.0, typical=0.0),)
    (line,) = compare_lines(replace(LOGGING, stacks=whole))
    assert line.low_ms < line.more_ms == line.high_ms == 200.0


def test_steps_that_run_the_same_have_no_line() -> None:
    same = (StackShare(frames=(MAIN, FORWARD), stalled=1.0, typical=1.0),)
    assert compare_lines(replace(LOGGING, stalled_ms=51.0, stalled_samples=25, stacks=same)) == ()


def test_samples_of_several_ranks_count_once_each() -> None:
    """The second rank has a third of the samples, all in forward; its steps are shorter."""
    quiet = replace(
        LOGGING,
        stalled_steps=5,
        stalled_samples=50,
        stalled_ms=80.0,
        stacks=(StackShare(frames=(MAIN, FORWARD), stalled=1.0, typical=1.0),),
    )
    merged = merge_differences([LOGGING, quiet])
    assert (merged.stalled_samples, merged.typical_samples) == (150, 450)
    assert (merged.stalled_steps, merged.typical_steps) == (15, 180)
    assert merged.stalled_ms == pytest.approx((10 * 200 + 5 * 80) / 15)
    assert sum(stack.stalled for stack in merged.stacks) == pytest.approx(1.0)
    shares = {stack.frames: (stack.stalled, stack.typical) for stack in merged.stacks}
    assert shares[MAIN, FORWARD] == pytest.approx(((25 + 50) / 150, (216 + 225) / 450))
    assert shares[MAIN, SAVING, WRITE] == pytest.approx((70 / 150, 0.0))


def test_one_rank_stays_as_it_is() -> None:
    assert merge_differences([LOGGING]) is LOGGING
