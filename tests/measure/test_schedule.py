"""Which step does what follows from its number alone."""

from __future__ import annotations

import sys

import pytest

from stepscope.measure.profiler.schedule import PlannedWindow, Schedule
from stepscope.measure.settings import Settings


def schedule(**settings: object) -> Schedule:
    return Schedule.plan(Settings(folder="", **settings))  # type: ignore[arg-type]


def roles(schedule: Schedule, steps: int = 40) -> dict[str, list[int]]:
    return {
        "opens": [n for n in range(steps) if schedule.opens(n) is not None],
        "closes": [n for n in range(steps) if schedule.closes(n)],
        "memory": [n for n in range(steps) if schedule.measures_memory(n)],
    }


def test_one_window_then_one_step_for_memory() -> None:
    found = roles(schedule(wait=4, warmup=1, active=2))
    assert found == {"opens": [4], "closes": [7], "memory": [8]}


def test_windows_repeat_and_memory_waits_for_the_last() -> None:
    found = roles(schedule(wait=3, warmup=1, active=1, repeat=3))
    assert found == {"opens": [3, 8, 13], "closes": [5, 10, 15], "memory": [16]}


def test_repeated_windows_have_files_of_their_own() -> None:
    files = [window.file for window in schedule(wait=3, repeat=3).windows]
    assert files == ["trace.json.gz", "trace-1.json.gz", "trace-2.json.gz"]


def test_memory_can_be_left_out() -> None:
    assert roles(schedule(wait=3, memory=False))["memory"] == []
    assert roles(schedule(memory=False))["memory"] == []


def test_the_first_step_is_never_recorded_because_its_beginning_was_not_seen() -> None:
    assert roles(schedule(wait=0, warmup=0, active=1))["opens"] == [1]


def test_without_a_wait_early_windows_come_before_the_one_that_stays() -> None:
    """A script of 3 steps has one recorded step, of 9 two, of 15 three."""
    plan = schedule()
    recorded = [list(range(each.first_active, each.last + 1)) for each in plan.windows]
    assert recorded == [[2], [7, 8], [12, 13, 14]]
    assert {window.file for window in plan.windows} == {"trace.json.gz"}
    assert roles(plan) == {"opens": [1, 6, 10], "closes": [3, 9, 15], "memory": [5, 16]}


def test_regular_windows_go_on_without_end() -> None:
    plan = schedule(wait=4, warmup=1, active=2, every=10)
    assert roles(plan, 50) == {
        "opens": [4, 10, 20, 30, 40],
        "closes": [7, 13, 23, 33, 43],
        "memory": [8],
    }
    month = plan.opens(2_600_000)
    assert month is not None
    assert month.file == "trace-step-2600001.json.gz"
    assert month.kind == "regular"
    assert plan.next_due(2_600_004) == 2_600_010


def test_regular_windows_come_after_the_others() -> None:
    assert roles(schedule(every=8), 40)["opens"] == [1, 6, 10, 24, 32]


def test_regular_windows_leave_plain_steps_between_them() -> None:
    assert roles(schedule(wait=1, warmup=2, active=3, every=1), 30)["opens"] == [1, 14, 21, 28]


def test_a_window_that_is_asked_for_on_the_way_opens_once() -> None:
    plan = schedule(wait=4, warmup=1, active=2)
    plan.extra = PlannedWindow(first=20, warmup=1, active=3, kind="stall")
    assert roles(plan) == {"opens": [4, 20], "closes": [7, 24], "memory": [8]}
    assert plan.next_due(plan.host_steps[-1] + 1) == 20


def test_the_host_is_measured_after_memory_and_gives_way_to_windows() -> None:
    plan = schedule(wait=4, warmup=1, active=2)
    assert plan.host_steps == (10, 11, 12, 13, 14)
    assert [step for step in range(40) if plan.stops_in_forward(step)] == [11, 13]
    assert plan.is_free(11, 13)


def test_steps_are_free_where_nothing_is_planned() -> None:
    plan = schedule(wait=4, warmup=1, active=2, every=20)
    free = [first for first in range(60) if plan.is_free(first, first + 2)]
    assert free == [*range(10, 16), *range(25, 36), *range(45, 56)]


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize("every", [0, 9, 30])
@pytest.mark.parametrize(
    ("wait", "warmup", "active"), [(10, 2, 3), (1, 0, 1), (4, 1, 2), (None, 2, 3)]
)
def test_the_next_due_step_is_the_first_that_something_is_done_for(
    wait: int | None, warmup: int, active: int, every: int, repeat: int, memory: bool
) -> None:
    settings = {"wait": wait, "warmup": warmup, "active": active}
    plan = schedule(**settings, every=every, repeat=repeat, memory=memory)
    planned = [*roles(plan, 200).values(), plan.host_steps]
    due = sorted({step for steps in planned for step in steps})
    for step in range(100):
        assert plan.next_due(step) == next((n for n in due if n >= step), sys.maxsize)
