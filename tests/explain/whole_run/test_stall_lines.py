"""Times of lines in stalled steps against typical ones, with shares made by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from stepscope.explain.whole_run.stall_stacks import compare_lines, merge_differences
from stepscope.records.source_lines import Place, StackDifference, StackShare

MAIN = Place(file="/home/u/train.py", line=10, function="main")
FORWARD = Place(file="/home/u/model.py", line=5, function="Model.forward")
SAVE = Place(file="/home/u/train.py", line=41, function="log_images")
WRITE = Place(file="/usr/lib/python3/site-packages/PIL/Image.py", line=7, function="save")

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
        StackShare(frames=(MAIN, SAVE, WRITE), stalled=0.70, typical=0.0),
        StackShare(frames=(MAIN, SAVE), stalled=0.05, typical=0.04),
    ),
)


def test_a_line_runs_longer_by_its_share_of_each_kind_of_step() -> None:
    """75% of 200 ms against 4% of 50 ms; forward takes about 50 ms in both."""
    (line,) = compare_lines(LOGGING)
    assert line.place == SAVE
    assert line.more_ms == pytest.approx(0.75 * 200 - 0.04 * 50)
    # The standard errors: 200 ms * sqrt(0.745 * 0.255 / 102) and 50 ms * sqrt(0.044 * 0.956 / 227).
    assert line.high_ms - line.more_ms == pytest.approx(1.96 * 8.66, rel=0.01)
    assert line.more_ms - line.low_ms == pytest.approx(line.high_ms - line.more_ms)


def test_a_line_never_runs_longer_than_the_step() -> None:
    whole = (StackShare(frames=(SAVE,), stalled=1.0, typical=0.0),)
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
    assert shares[MAIN, SAVE, WRITE] == pytest.approx((70 / 150, 0.0))


def test_one_rank_stays_as_it_is() -> None:
    assert merge_differences([LOGGING]) is LOGGING
