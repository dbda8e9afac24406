"""Phases with a fake clock: every nanosecond belongs to one, and they add up to the step."""

from __future__ import annotations

from stepscope.measure.steps import PHASES, StepClock


class Clock:
    """A clock that is told the time."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns

    def at(self, ns: int) -> None:
        self.ns = ns


def made() -> tuple[Clock, StepClock]:
    clock = Clock()
    return clock, StepClock(clock)


def test_a_step_with_a_data_loader_is_divided_by_what_ran() -> None:
    clock, step = made()
    clock.at(5)
    step.enter("data")
    clock.at(25)
    step.leave("data")
    clock.at(60)  # forward: 35
    step.enter("backward")
    clock.at(130)
    step.leave("backward")
    clock.at(140)  # clipping: other
    step.enter("optimizer")
    clock.at(155)
    step.leave("optimizer")
    row = step.finish()
    assert row == {
        "wall_ns": 155,
        "data_ns": 20,
        "forward_ns": 35,
        "backward_ns": 70,
        "optimizer_ns": 15,
        "other_ns": 15,
    }


def test_a_closure_inside_the_optimizer_is_not_counted_twice() -> None:
    clock, step = made()
    step.enter("optimizer")
    for begin, end in ((10, 20), (30, 45)):
        clock.at(begin)
        step.enter("backward")
        clock.at(end)
        step.leave("backward")
    clock.at(50)
    step.leave("optimizer")
    row = step.finish()
    assert row["backward_ns"] == 25
    assert row["optimizer_ns"] == 25
    assert sum(row[f"{phase}_ns"] for phase in PHASES) == row["wall_ns"] == 50


def test_without_a_data_loader_what_is_neither_backward_nor_optimizer_is_forward() -> None:
    clock, step = made()
    step.enter("optimizer")
    clock.at(5)
    step.leave("optimizer")
    step.finish()
    clock.at(45)
    step.enter("backward")
    clock.at(100)
    step.leave("backward")
    assert step.finish()["forward_ns"] == 40


def test_a_stray_end_changes_nothing() -> None:
    clock, step = made()
    clock.at(10)
    step.leave("backward")
    clock.at(30)
    row = step.finish()
    assert sum(row[f"{phase}_ns"] for phase in PHASES) == row["wall_ns"] == 30


def test_time_of_our_own_between_steps_is_nobodys() -> None:
    clock, step = made()
    clock.at(10)
    step.finish()
    clock.at(500)
    step.restart()
    clock.at(520)
    assert step.finish()["wall_ns"] == 20
