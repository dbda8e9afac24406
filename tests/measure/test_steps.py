"""Phases from notes with made-up times: every nanosecond belongs to one, and they add up."""

from __future__ import annotations

import json
from typing import Any

from stepscope.measure.steps import (
    AGAIN,
    ENDED,
    ENTER,
    LEAVE,
    PERHAPS,
    PHASES,
    Anchor,
    Note,
    StepClock,
    StepLines,
)


def ended(at: int, number: int = 0, events: Any = None, marks: tuple[str, ...] = ()) -> Note:
    return (ENDED, at, (number, 1000 + at, False, events, marks, False))


def times(*notes: Note) -> dict[str, int]:
    """Of the last step that ended."""
    *_, (_, wall, spent) = StepClock().read(notes)
    assert tuple(spent) == PHASES
    return {"wall": wall, **spent}


def test_a_step_with_a_data_loader_is_divided_by_what_ran() -> None:
    assert times(
        (ENTER, 5, "data"),
        (LEAVE, 25, "data"),
        (ENTER, 60, "backward"),  # forward: 35
        (LEAVE, 130, "backward"),
        (ENTER, 140, "optimizer"),  # clipping: other
        (LEAVE, 155, "optimizer"),
        ended(155),
    ) == {"wall": 155, "data": 20, "forward": 35, "backward": 70, "optimizer": 15, "other": 15}


def test_a_closure_inside_the_optimizer_is_not_counted_twice() -> None:
    found = times(
        (ENTER, 0, "optimizer"),
        (ENTER, 10, "backward"),
        (LEAVE, 20, "backward"),
        (ENTER, 30, "backward"),
        (LEAVE, 45, "backward"),
        (LEAVE, 50, "optimizer"),
        ended(50),
    )
    assert found["backward"] == 25
    assert found["optimizer"] == 25
    assert sum(found[phase] for phase in PHASES) == found["wall"] == 50


def test_without_a_data_loader_what_is_neither_backward_nor_optimizer_is_forward() -> None:
    found = times(
        (ENTER, 0, "optimizer"),
        (LEAVE, 5, "optimizer"),
        ended(5),
        (ENTER, 45, "backward"),
        (LEAVE, 100, "backward"),
        ended(100, 1),
    )
    assert found["forward"] == 40


def test_a_stray_end_changes_nothing() -> None:
    found = times((LEAVE, 10, "backward"), ended(30))
    assert sum(found[phase] for phase in PHASES) == found["wall"] == 30


def test_a_step_that_was_known_as_one_only_later_gets_its_own_time() -> None:
    """Another optimizer takes over: its first step was a step of its own."""
    notes: list[Note] = [
        ended(10),
        (ENTER, 20, "backward"),
        (LEAVE, 40, "backward"),
        (PERHAPS, 50, 1050),
        (ENTER, 60, "backward"),
        (LEAVE, 90, "backward"),
        (PERHAPS, 95, 1095),  # yet another one: the first counts
        (ENDED, 100, (2, 1100, False, None, (), True)),
    ]
    _, first, second = StepClock().read(notes)
    assert (first[0][:2], first[1], first[2]["backward"]) == ((1, 1050), 40, 20)
    assert (second[0][:2], second[1], second[2]["backward"]) == ((2, 1100), 50, 30)
    for _, wall, spent in (first, second):
        assert sum(spent.values()) == wall


def test_time_of_our_own_between_steps_is_nobodys() -> None:
    found = times(ended(10), (AGAIN, 500, None), ended(520, 1))
    assert sum(found[phase] for phase in PHASES) == found["wall"] == 20


def test_a_step_may_end_in_a_later_reading_than_it_began() -> None:
    clock = StepClock()
    assert list(clock.read([(ENTER, 10, "backward")])) == []
    ((_, wall, spent),) = clock.read([(LEAVE, 40, "backward"), ended(50)])
    assert (wall, spent["backward"]) == (50, 30)


def test_a_line_says_what_is_known_of_its_step() -> None:
    (line,) = StepLines(0)([ended(7, 3, marks=("first", "skipped"))])
    assert json.loads(line) == {
        "step": 3,
        "wall_ns": 7,
        "data_ns": 0,
        "forward_ns": 0,
        "backward_ns": 0,
        "optimizer_ns": 0,
        "other_ns": 7,
        "end_unix_ns": 1007,
        "window": False,
        "first": True,
        "skipped": True,
    }


class Event:
    """A device's event that has been reached or not."""

    def __init__(self, *, reached: bool) -> None:
        self.reached = reached

    def query(self) -> bool:
        return self.reached

    def elapsed_time(self, _other: Event) -> float:
        return 0.25


def test_a_step_that_the_device_has_not_ended_holds_back_those_behind_it() -> None:
    lines = StepLines(0)
    late = Event(reached=False)
    pair = (Event(reached=True), late)
    assert len(lines([ended(1), ended(2, 1, pair), ended(3, 2)])) == 1
    assert lines([]) == []
    late.reached = True
    rows = [json.loads(line) for line in lines([])]
    assert [(row["step"], row.get("device_ns")) for row in rows] == [(1, 250_000), (2, None)]


def test_at_the_end_nothing_waits_for_the_device() -> None:
    pair = (Event(reached=True), Event(reached=False))
    (line,) = StepLines(0)([ended(1, 0, pair)], last=True)
    assert "device_ns" not in json.loads(line)


def test_a_device_that_fails_costs_its_own_time_only() -> None:
    (line,) = StepLines(0)([ended(1, 4, ("no", "events"))])
    assert json.loads(line)["step"] == 4


class Optimizer:
    """Something that can be referred to weakly."""


def test_the_first_optimizer_ends_steps_and_others_in_between_do_not() -> None:
    anchor, first, second = Anchor(), Optimizer(), Optimizer()
    turns = [first, second, first, second, first]
    assert [anchor.ends_steps(optimizer) for optimizer in turns] == [1, 0, 1, 0, 1]


def test_an_optimizer_that_goes_on_alone_takes_over() -> None:
    anchor, first, second = Anchor(), Optimizer(), Optimizer()
    assert anchor.ends_steps(first)
    turns = [second, second, second, first, second]
    assert [anchor.ends_steps(optimizer) for optimizer in turns] == [0, 2, 1, 0, 1]


def test_an_optimizer_that_is_gone_is_replaced() -> None:
    anchor, first = Anchor(), Optimizer()
    assert anchor.ends_steps(first) == 1
    del first
    assert anchor.ends_steps(Optimizer()) == 1
