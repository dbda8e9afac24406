"""Phases from notes with made-up times: every nanosecond belongs to one, and they add up."""

from __future__ import annotations

import json
import resource
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from stepscope.measure.steps.phases import (
    AGAIN,
    ENDED,
    ENTER,
    EXHAUSTED,
    FETCH,
    FETCHED,
    GRAPHS,
    LEAVE,
    MODE,
    NO_BATCH,
    PERHAPS,
    PHASES,
    RARE_PHASES,
    Note,
    StepClock,
)
from stepscope.measure.steps.step_times import Anchor, StepLines

if TYPE_CHECKING:
    import pytest

TRAINING, VALIDATION = 11, 22  # loaders
MS = 1_000_000


def ended(
    at: int, number: int = 0, events: Any = None, marks: tuple[str, ...] = (), reading: Any = None
) -> Note:
    return (ENDED, at, (number, 1000 + at, False, events, marks, False, reading))


def fetch(
    begin: int, end: int, loader: int = TRAINING, elements: int = 64, *, gradients: bool = True
) -> list[Note]:
    return [(FETCH, begin, (loader, False, gradients)), (FETCHED, end, elements)]


def create(begin: int, end: int, loader: int = TRAINING, *, gradients: bool = True) -> list[Note]:
    """A loader's iterator."""
    return [(FETCH, begin, (loader, True, gradients)), (FETCHED, end, NO_BATCH)]


def backward(begin: int, end: int) -> list[Note]:
    return [(ENTER, begin, "backward"), (LEAVE, end, "backward")]


def first_step() -> list[Note]:
    """Shows which loader is trained on; ends at 100."""
    return [*create(0, 10), *fetch(10, 20), *backward(60, 100), ended(100)]


def all_times(*notes: Note) -> list[dict[str, int]]:
    """Of every step: phases that are not zero, and what is noted next to them. They add up."""
    rows = []
    for _, wall, spent in StepClock().read(notes):
        assert sum(spent[phase] for phase in (*PHASES, *RARE_PHASES)) == wall
        rows.append({"wall": wall, **{name: value for name, value in spent.items() if value}})
    return rows


def times(*notes: Note) -> dict[str, int]:
    """Of the last step that ended."""
    return all_times(*notes)[-1]


def test_a_step_with_a_data_loader_is_divided_by_what_ran() -> None:
    assert times(
        *fetch(5, 25),
        *backward(60, 130),  # forward: 35
        (ENTER, 140, "optimizer"),  # clipping: other
        (LEAVE, 155, "optimizer"),
        ended(155),
    ) == {
        "wall": 155, "data": 20, "forward": 35, "backward": 70, "optimizer": 15, "other": 15,
        "elements": 64,
    }  # fmt: skip


def test_a_closure_inside_the_optimizer_is_not_counted_twice() -> None:
    step = times(
        (ENTER, 0, "optimizer"),
        (ENTER, 10, "backward"),
        (LEAVE, 20, "backward"),
        (ENTER, 30, "backward"),
        (LEAVE, 45, "backward"),
        (LEAVE, 50, "optimizer"),
        ended(50),
    )
    assert step == {"wall": 50, "backward": 25, "optimizer": 25}


def test_without_a_data_loader_what_is_neither_backward_nor_optimizer_is_forward() -> None:
    step = times(
        (ENTER, 0, "optimizer"),
        (LEAVE, 5, "optimizer"),
        ended(5),
        *backward(45, 100),
        ended(100, 1),
    )
    assert step["forward"] == 40


def test_a_stray_end_changes_nothing() -> None:
    assert times((LEAVE, 10, "backward"), (FETCHED, 20, 3), ended(30))["wall"] == 30


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
        (ENDED, 100, (2, 1100, False, None, (), True, None)),
    ]
    _, first, second = StepClock().read(notes)
    assert (first[0][:2], first[1], first[2]["backward"]) == ((1, 1050), 40, 20)
    assert (second[0][:2], second[1], second[2]["backward"]) == ((2, 1100), 50, 30)
    for _, wall, spent in (first, second):
        assert sum(spent.values()) == wall


def test_time_of_our_own_between_steps_is_nobodys() -> None:
    assert times(ended(10), (AGAIN, 500, None), ended(520, 1))["wall"] == 20


def test_a_step_may_end_in_a_later_reading_than_it_began() -> None:
    clock = StepClock()
    assert list(clock.read([(ENTER, 10, "backward")])) == []
    ((_, wall, spent),) = clock.read([(LEAVE, 40, "backward"), ended(50)])
    assert (wall, spent["backward"]) == (50, 30)


def test_evaluation_between_two_steps_is_a_phase_of_its_own() -> None:
    assert times(
        *first_step(),
        (MODE, 110, False),
        *create(115, 120, VALIDATION),
        *fetch(120, 160, VALIDATION),  # the evaluation's batches are no wait of the training's
        (MODE, 600, True),
        *fetch(610, 630),
        *backward(700, 800),
        ended(820, 1),
    ) == {
        "wall": 720, "evaluation": 490, "data": 20, "forward": 70, "backward": 100, "other": 40,
        "elements": 64,
    }  # fmt: skip


def test_evaluation_ends_with_the_next_training_batch_where_nobody_calls_train() -> None:
    step = times(
        *first_step(),
        (MODE, 110, False),
        *fetch(120, 160, VALIDATION),
        *fetch(600, 620, elements=48),
        *backward(700, 800),
        ended(800, 1),
    )
    assert (step["evaluation"], step["data"], step["forward"]) == (490, 20, 80)
    assert step["elements"] == 48


def test_a_batch_fetched_before_train_is_called_belongs_to_the_training() -> None:
    """A trainer that calls `train()` in every step, after it has fetched the batch."""
    step = times(
        *first_step(),
        (MODE, 110, False),
        *fetch(120, 160, VALIDATION),
        (FETCH, 400, (VALIDATION, False, True)),
        (FETCHED, 410, EXHAUSTED),
        *fetch(600, 620),
        (MODE, 630, True),
        *backward(700, 800),
        ended(800, 1),
    )
    assert (step["evaluation"], step["data"], step["forward"]) == (490, 20, 80)


def test_a_frozen_part_of_the_model_is_no_evaluation() -> None:
    assert times(*fetch(0, 10), (MODE, 12, False), *backward(50, 70), ended(70)) == {
        "wall": 70, "data": 10, "forward": 40, "backward": 20, "elements": 64,
    }  # fmt: skip


def test_a_frozen_part_leaves_the_first_batch_of_an_epoch_its_size() -> None:
    step = times(*create(0, 5), *fetch(5, 10), (MODE, 12, False), *backward(50, 70), ended(70))
    assert step["elements"] == 64


def test_a_part_in_evaluation_mode_between_two_passes_is_no_evaluation() -> None:
    """A GAN's discriminator, while its generator is trained."""
    step = times(
        *fetch(0, 10),
        *backward(30, 40),
        (MODE, 45, False),
        *backward(80, 90),
        (MODE, 92, True),
        ended(100),
    )
    assert step == {
        "wall": 100, "data": 10, "forward": 55, "backward": 20, "other": 15, "elements": 64
    }  # fmt: skip


def test_batches_fetched_without_gradients_are_an_evaluation_that_nobody_announced() -> None:
    step = times(
        *first_step(),
        *create(200, 210, VALIDATION, gradients=False),
        *fetch(210, 250, VALIDATION, gradients=False),
        (FETCH, 500, (VALIDATION, False, False)),
        (FETCHED, 510, EXHAUSTED),
        *fetch(600, 620),
        *backward(700, 800),
        ended(800, 1),
    )
    assert (step["evaluation"], step["data"], step["other"]) == (310, 20, 190)
    assert step["elements"] == 64


def test_batches_that_are_trained_on_may_be_fetched_without_gradients() -> None:
    row = [*fetch(210, 250, gradients=False), *backward(300, 400), ended(400, 1)]
    assert times(*first_step(), *row)["data"] == 40


def test_evaluation_inside_an_epoch_leaves_the_epoch_alone() -> None:
    steps = all_times(
        *first_step(),
        (MODE, 110, False),
        *create(115, 120, VALIDATION),
        (FETCH, 150, (VALIDATION, False, False)),
        (FETCHED, 160, EXHAUSTED),
        (MODE, 200, True),
        *fetch(200, 220),
        *backward(300, 400),
        ended(400, 1),
    )
    assert all("epoch_gap" not in step for step in steps)


def test_between_two_epochs() -> None:
    """The step's own time: meters (100-110), then from the iterator's creation on (1000-1200)."""
    step = times(
        *first_step(),
        (FETCH, 110, (TRAINING, False, True)),
        (FETCHED, 130, EXHAUSTED),
        (MODE, 140, False),
        *create(150, 160, VALIDATION),
        (FETCH, 590, (VALIDATION, False, False)),
        (FETCHED, 600, EXHAUSTED),
        (ENTER, 700, "checkpoint"),
        (LEAVE, 900, "checkpoint"),
        (MODE, 950, True),
        *create(1000, 1050),
        *fetch(1050, 1080),
        *backward(1100, 1200),
        ended(1200, 1),
    )
    assert step == {
        "wall": 1100, "data": 80, "forward": 20, "backward": 100, "other": 10,
        "evaluation": 610, "checkpoint": 200, "between_epochs": 80, "epoch_gap": 890,
        "elements": 64,
    }  # fmt: skip


def test_a_loader_that_is_created_anew_for_every_epoch_ends_the_time_between_them() -> None:
    step = times(
        *first_step(),
        (FETCH, 110, (TRAINING, False, True)),
        (FETCHED, 130, EXHAUSTED),
        *create(500, 520, loader=33),
        *fetch(520, 550, loader=33, elements=32),
        *backward(600, 700),
        ended(700, 1),
    )
    assert (step["between_epochs"], step["epoch_gap"]) == (390, 390)
    assert (step["data"], step["forward"], step["elements"]) == (50, 50, 32)


def look_ahead() -> list[Note]:
    """Two epochs of three batches; one batch is always fetched before its step, as accelerate does.
    Validation after the first one."""
    notes: list[Note] = []
    for start in (0, 3000):
        notes += [*create(start, start + 10), *fetch(start + 10, start + 20, elements=1)]
        for number in (1, 2):
            at = start + 100 * number
            notes += [*fetch(at, at + 10, elements=number + 1), *backward(at + 20, at + 60)]
            notes += [ended(at + 60)]
        notes += [(FETCH, start + 300, (TRAINING, False, True)), (FETCHED, start + 305, EXHAUSTED)]
        notes += [*backward(start + 320, start + 360), ended(start + 360)]
        notes += [(MODE, start + 400, False), (MODE, start + 900, True)]
    return notes


def test_a_loader_that_looks_ahead_meets_its_end_before_the_last_step() -> None:
    steps = all_times(*look_ahead())
    assert [step.get("epoch_gap", 0) for step in steps] == [0, 0, 0, 2600, 0, 0]
    assert steps[3]["evaluation"] == 500
    assert steps[3]["between_epochs"] == 2100
    assert steps[2]["data"] == 5


def test_a_batch_that_is_fetched_ahead_counts_in_the_step_that_trains_on_it() -> None:
    """That one is ahead is known from the second step on."""
    elements = [step["elements"] for step in all_times(*look_ahead())]
    assert elements == [3, 2, 3, 1, 2, 3]


def test_accumulated_batches_count_together() -> None:
    notes = [*create(0, 1), *fetch(1, 2), *backward(3, 4), *fetch(5, 6), *backward(7, 8)]
    more = [*fetch(11, 12), *backward(13, 14), *fetch(15, 16), *backward(17, 18)]
    steps = all_times(*notes, ended(9), *more, ended(19, 1))
    assert [step["elements"] for step in steps] == [128, 128]


def test_zipped_loaders_are_fetched_together() -> None:
    first = [*create(0, 5), *create(5, 10, 33), *fetch(10, 20), *fetch(20, 25, 33)]
    step = times(
        *[*first, *backward(50, 90), ended(100)],
        *fetch(110, 120),
        *[(FETCH, 120, (33, False, True)), (FETCHED, 125, EXHAUSTED)],
        (MODE, 130, False),  # nobody calls train()
        *[*create(500, 510), *create(510, 530, 33), *fetch(530, 540), *fetch(540, 550, 33)],
        *backward(600, 700),
        ended(700, 1),
    )
    assert step["data"] == 10 + 50
    assert step["epoch_gap"] == 500 - 120
    assert step["forward"] == 50


def test_an_optimizers_step_after_the_last_batch_is_still_training() -> None:
    """What is left of accumulated gradients; the epoch is over with the validation."""
    step = times(
        *first_step(),
        *fetch(110, 120),
        *backward(150, 200),
        (FETCH, 210, (TRAINING, False, True)),
        (FETCHED, 220, EXHAUSTED),
        (ENTER, 230, "optimizer"),
        (LEAVE, 250, "optimizer"),
        ended(250, 1),
    )
    assert "epoch_gap" not in step
    assert step["data"] == 20


LOADERS = st.sampled_from((TRAINING, VALIDATION))
EVENTS = st.one_of(
    st.tuples(st.just(FETCH), LOADERS, st.sampled_from((NO_BATCH, EXHAUSTED, 8)), st.booleans()),
    st.tuples(st.just(MODE), st.booleans()),
    st.tuples(st.just(ENTER), st.sampled_from(("backward", "checkpoint", "gc", "compile"))),
    st.tuples(st.just(ENDED), st.booleans()),
    st.tuples(st.just(PERHAPS)),
    st.tuples(st.just(AGAIN)),
)


def as_notes(event: Any, number: int) -> list[tuple[int, Any]]:
    what, *details = event
    if what == FETCH:
        loader, outcome, gradients = details
        return [(FETCH, (loader, outcome == NO_BATCH, gradients)), (FETCHED, outcome)]
    if what == MODE:
        return [(MODE, details[0])]
    if what == ENTER:
        return [(ENTER, details[0]), (LEAVE, details[0])]
    optimizer: list[tuple[int, Any]] = [(ENTER, "optimizer"), (LEAVE, "optimizer")]
    if what == PERHAPS:
        return [*optimizer, (PERHAPS, 1)]
    end = (ENDED, (number, 1, False, None, (), what == ENDED and details[0], None))
    return [*optimizer, end] if what == ENDED else [*optimizer, end, (AGAIN, None)]


@given(st.lists(EVENTS, max_size=40), st.lists(st.integers(0, 2 * MS), min_size=1, max_size=9))
def test_whatever_happens_phases_add_up_and_none_is_negative(
    events: list[Any], pauses: list[int]
) -> None:
    notes: list[Note] = []
    now = 0
    for number, event in enumerate(events):
        for what, it in as_notes(event, number):
            now += pauses[len(notes) % len(pauses)]
            notes.append((what, now, it))
    for _, wall, spent in StepClock().read(notes):
        assert min(spent.values()) >= 0
        assert sum(spent[phase] for phase in (*PHASES, *RARE_PHASES)) == wall
        assert spent["epoch_gap"] <= wall


def test_a_collection_inside_forward_is_not_forward() -> None:
    gc: list[Note] = [(ENTER, 20, "gc"), (LEAVE, 50, "gc")]
    step = times(*fetch(0, 10), *gc, *backward(60, 70), ended(70))
    assert (step["gc"], step["forward"]) == (30, 20)


def test_graphs_and_the_time_to_compile_them() -> None:
    compiles: list[Note] = [(ENTER, 20, "compile"), (LEAVE, 50, "compile"), (GRAPHS, 50, 2)]
    step = times(*fetch(0, 10), *compiles, *backward(60, 70), ended(70))
    assert (step["compile"], step["graphs"], step["forward"]) == (30, 2, 20)


def test_a_checkpoint_after_the_optimizer_belongs_to_the_step_that_has_begun() -> None:
    step = times(ended(5), (ENTER, 10, "checkpoint"), (LEAVE, 90, "checkpoint"), ended(100, 1))
    assert (step["checkpoint"], step["wall"]) == (80, 95)


def test_what_follows_the_last_step_is_known_too() -> None:
    lines = StepLines(0)
    lines([*first_step(), (MODE, 120, False), (MODE, 500, True), (ENTER, 510, "checkpoint")])
    lines([(LEAVE, 600, "checkpoint")], last=True)
    assert lines.after_last_step() == {"other_ns": 30, "evaluation_ns": 380, "checkpoint_ns": 90}


def test_rare_things_are_written_only_when_they_happen() -> None:
    notes = [*first_step(), (ENTER, 110, "gc"), (LEAVE, 150, "gc"), ended(160, 1)]
    first, second = (json.loads(line) for line in StepLines(0)(notes))
    assert (first["elements"], "gc_ns" in first) == (64, False)
    assert (second["gc_ns"], "elements" in second) == (40, False)


def counters(waited: int, faults: int = 0) -> Any:
    return (b"9 %d 7\n" % waited, faults)


def test_what_the_system_counted_is_written_above_a_floor() -> None:
    """A wait of half a millisecond for a core, and a page from disk."""
    readings = [
        (None, counters(10 * MS), None),
        (None, counters(10 * MS + 499_999), None),
        (None, counters(12 * MS), None),
        (counters(20 * MS, 5), counters(20 * MS, 6), b"900 3 1 1 0 1 0\n"),
        (None, counters(20 * MS, 6), (5000, 2)),
        (None, counters(20 * MS, 6), (6000, 5)),
    ]
    notes = [ended(n, n, reading=reading) for n, reading in enumerate(readings)]
    keys = ("cpu_wait_ns", "major_faults", "allocated_bytes", "retries")
    rows = [json.loads(line) for line in StepLines(0)(notes)]
    assert [{key: row[key] for key in keys if key in row} for row in rows] == [
        {},
        {},
        {"cpu_wait_ns": 1_500_001},
        {"major_faults": 1, "allocated_bytes": 3 * resource.getpagesize()},
        {"allocated_bytes": 5000},
        {"allocated_bytes": 6000, "retries": 3},
    ]


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


def test_the_last_steps_wait_for_a_device_that_the_host_ran_ahead_of() -> None:
    class Late(Event):
        looks = 0

        def query(self) -> bool:
            self.looks += 1
            return self.looks > 3

    pairs = [(Event(reached=True), Late(reached=False)) for _ in range(2)]
    notes = [ended(1 + number, number, pair) for number, pair in enumerate(pairs)]
    rows = [json.loads(line) for line in StepLines(0)(notes, last=True)]
    assert [row["device_ns"] for row in rows] == [250_000, 250_000]


def test_a_device_that_never_ends_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.measure.steps.step_times._LAST_WAIT_S", 0.01)
    pair = (Event(reached=True), Event(reached=False))
    (line,) = StepLines(0)([ended(1, 0, pair)], last=True)
    assert "device_ns" not in json.loads(line)


def test_a_device_that_fails_costs_its_own_time_only() -> None:
    (line,) = StepLines(0)([ended(1, 4, ("no", "events"))])
    assert json.loads(line)["step"] == 4


def test_an_idle_device_that_handled_both_events_at_once_has_no_time() -> None:
    class AtOnce(Event):
        def elapsed_time(self, _other: Event) -> float:
            return 0.0

    pair = (AtOnce(reached=True), AtOnce(reached=True))
    (line,) = StepLines(0)([ended(1, 4, pair)])
    assert "device_ns" not in json.loads(line)


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


def test_what_compiles_or_collects_during_evaluation_is_evaluation() -> None:
    evaluation: list[Note] = [(MODE, 10, False), (ENTER, 20, "compile"), (LEAVE, 50, "compile")]
    step = times(ended(5), *evaluation, (MODE, 60, True), *backward(70, 80), ended(100, 1))
    assert (step["evaluation"], step.get("compile")) == (50, None)


def test_a_batch_that_turns_out_to_be_trained_on_compiles_as_itself() -> None:
    """`train()` is never called: only the backward pass shows that evaluation is over."""
    notes = [*first_step(), (MODE, 120, False), *fetch(130, 140, VALIDATION), *fetch(200, 210)]
    compiles: list[Note] = [(ENTER, 220, "compile"), (LEAVE, 250, "compile")]
    step = times(*notes, *compiles, *backward(260, 270), ended(280, 1))
    assert (step["compile"], step["data"], step["evaluation"]) == (30, 10, 80)


def test_a_dataset_that_saves_what_it_prepared_is_data() -> None:
    saves: list[Note] = [(ENTER, 2, "checkpoint"), (LEAVE, 8, "checkpoint")]
    begin, end = fetch(0, 10)
    step = times(begin, *saves, end, *backward(20, 30), ended(40))
    assert (step["data"], step.get("checkpoint")) == (10, None)
