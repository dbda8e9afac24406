"""The host's own time from steps that measured it."""

from __future__ import annotations

from stepscope.explain.whole_run.host_time import own_phases_ns
from stepscope.records.host_steps import HostStepTimes


def step(forward: int, *, fine: bool = False, alone: bool = True) -> HostStepTimes:
    return HostStepTimes(fine=fine, alone=alone, forward_ns=forward, backward_ns=50, optimizer_ns=7)


def test_the_median_counts_where_nothing_filled_the_queue() -> None:
    steps = [step(100), step(110, fine=True), step(102), step(112, fine=True), step(900)]
    assert own_phases_ns(steps) == {"data": 0, "forward": 102, "backward": 50, "optimizer": 7}


def test_stopping_inside_forward_shows_the_host_behind_a_full_queue() -> None:
    steps = [step(400), step(110, fine=True), step(410), step(114, fine=True), step(405)]
    assert own_phases_ns(steps)["forward"] == 112


def test_too_few_steps_or_other_ranks_say_nothing() -> None:
    assert own_phases_ns([step(100)]) == {}
    assert own_phases_ns([step(100, alone=False)] * 5) == {}
    assert own_phases_ns([]) == {}
