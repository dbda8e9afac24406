"""The host's own time from steps that measured it."""

from __future__ import annotations

import numpy as np

from stepscope.explain.whole_run.rank_run import free_phases_ns, host_phases_ns, own_phases_ns
from stepscope.records.rank import StepColumns
from stepscope.records.rank_facts import HostStepTimes


def step(forward: int, *, fine: bool = False, alone: bool = True, stops: int = 10) -> HostStepTimes:
    return HostStepTimes(
        fine=fine, alone=alone, stops=stops, forward_ns=forward, backward_ns=50, optimizer_ns=7
    )


def test_the_median_counts_where_nothing_filled_the_queue() -> None:
    steps = [step(100), step(110, fine=True), step(102), step(112, fine=True), step(900)]
    assert own_phases_ns(steps) == {"data": 0, "forward": 102, "backward": 50, "optimizer": 7}


def test_stopping_inside_forward_shows_the_host_behind_a_full_queue() -> None:
    steps = [step(400), step(110, fine=True), step(410), step(114, fine=True), step(405)]
    assert own_phases_ns(steps)["forward"] == 112


def test_a_step_with_more_passes_than_the_others_does_not_count() -> None:
    steps = [step(100), step(150, fine=True), step(300, stops=15), step(150, fine=True), step(110)]
    assert own_phases_ns(steps)["forward"] == 105
    few = [step(100), step(300, stops=15)]
    assert own_phases_ns(few)["forward"] == 100
    alike = [step(100, stops=12), step(108, stops=13), step(104, stops=12)]
    assert own_phases_ns(alike)["forward"] == 104


def test_too_few_steps_or_other_ranks_say_nothing() -> None:
    assert own_phases_ns([step(100)]) == {}
    assert own_phases_ns([step(100, alone=False)] * 5) == {}
    assert own_phases_ns([]) == {}


def steps_with_windows(
    forward: list[int], backward: list[int], windows: list[int], device: int | None = None
) -> StepColumns:
    number = np.arange(len(forward))
    phases = {"forward": np.array(forward), "backward": np.array(backward)}
    return StepColumns(
        number=number,
        wall_ns=sum(phases.values(), np.zeros(len(number), np.int64)),
        end_unix_ns=number,
        phases_ns=phases,
        window=np.isin(number, windows),
        memory=np.zeros(len(number), np.bool_),
        whole=np.ones(len(number), np.bool_),
        device_ns=None if device is None else np.full(len(number), device),
    )


def test_steps_that_begin_with_an_empty_queue_show_the_host() -> None:
    steps = steps_with_windows(
        [900, 10, 300, 900, 12, 310, 900, 11, 290],
        [900, 20, 500, 900, 21, 500, 900, 25, 500],
        [0, 3, 6],
    )
    free = free_phases_ns(steps, launches=800)  # the lower quartile: others only add
    assert (free["forward"], free["backward"], free["optimizer"]) == (10, 20, 0)


def test_a_host_that_stays_behind_the_device_is_free_in_all_its_steps() -> None:
    steps = steps_with_windows([900, 60, *[40] * 6], [900, 80, *[60] * 6], [0], device=100)
    free = free_phases_ns(steps, launches=3000)
    assert (free["forward"], free["backward"]) == (40, 60)


def test_a_step_counts_until_the_host_has_filled_the_queue() -> None:
    """Four times as fast as the device: 645 launches wait after three steps, 870 after four."""
    steps = steps_with_windows(
        [900, 15, 10, 10, 24, 24, *[60] * 12], [900, 20, 15, 15, 1, 1, *[40] * 12], [0], device=100
    )
    free = free_phases_ns(steps, launches=300)
    assert (free["forward"], free["backward"]) == (10, 15)  # not 24, 1 of a full queue


def test_first_steps_after_a_window_do_not_count_where_later_ones_are_free() -> None:
    steps = steps_with_windows([900, 50, 30, 30, 30], [0, 60, 30, 30, 30], [0], device=65)
    free = free_phases_ns(steps, launches=100)
    assert (free["forward"], free["backward"]) == (30, 30)


def test_a_phase_that_is_shorter_in_full_steps_never_waits_there() -> None:
    steps = steps_with_windows(
        [900, 15, 10, 10, 10] * 3, [900, 20, 155, 190, 190] * 3, [0, 5, 10], device=200
    )
    free = free_phases_ns(steps, launches=800)
    assert (free["forward"], free["backward"]) == (10, 20)


def test_one_step_with_an_empty_queue_is_too_few() -> None:
    assert free_phases_ns(steps_with_windows([9, 1, 5], [9, 2, 5], [0]), launches=80) == {}


def test_the_shorter_of_two_ways_to_measure_counts_and_one_is_enough() -> None:
    free = steps_with_windows([900, 10, 900, 10], [900, 60, 900, 60], [0, 2])
    measured = [step(12), step(12)]  # backward 50, optimizer 7
    both = host_phases_ns(measured, free, launches=80)
    assert (both["forward"], both["backward"], both["optimizer"]) == (10, 50, 0)
    assert host_phases_ns([], free, launches=80)["backward"] == 60
    assert host_phases_ns(measured, free, launches=None)["forward"] == 12
    assert host_phases_ns([], None, launches=None) == {}


def test_one_step_of_each_kind_is_enough() -> None:
    free = steps_with_windows([900, 10, 900], [900, 60, 900], [0, 2])
    both = host_phases_ns([step(14)], free, launches=80)  # backward 50, optimizer 7
    assert (both["forward"], both["backward"]) == (11, 52)  # the lower quartile of the two


def test_a_step_after_an_empty_queue_may_nearly_fill_it() -> None:
    """1,600 launches in half of the device's time: 800 wait at the end, and never more."""
    steps = steps_with_windows([900, 20, 900, 20], [900, 30, 900, 30], [0, 2], device=100)
    assert free_phases_ns(steps, launches=1600)["backward"] == 30
    assert free_phases_ns(steps, launches=1800) == {}  # 900 wait: the host may have waited too


def test_among_ranks_neither_way_tells() -> None:
    free = steps_with_windows([900, 10, 900, 10], [900, 60, 900, 60], [0, 2])
    assert host_phases_ns([step(12, alone=False)], free, launches=80) == {}


def test_plain_steps_bound_the_phases_in_which_a_waiting_step_does_not_wait() -> None:
    """Forward waits for the device in every plain step; in backward, stopping only added."""
    stopped = [HostStepTimes(forward_ns=18, backward_ns=32, optimizer_ns=7)] * 3
    steps = steps_with_windows([900, 70, *[70] * 6], [900, 17, *[16] * 6], [0])
    own = host_phases_ns(stopped, steps, launches=None)
    assert (own["forward"], own["backward"]) == (18, 16)
    assert host_phases_ns([], steps, launches=None) == {}
