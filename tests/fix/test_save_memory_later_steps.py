"""The steps of an accepted plan are looked at again, without waiting for the device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from random_nets import same_bits
from saved_trainings import as_on_a_gpu as as_on_a_gpu
from saved_trainings import net, trained
from step_chains import chain

from stepscope.fix import save_memory
from stepscope.fix.saved import known_pass
from stepscope.fix.saved.known_pass import FIRST_LOOK, LaterLooks
from stepscope.fix.saved.memory_saver import promise
from stepscope.fix.saved.planner import plan_step
from stepscope.fix.saved.step_record import StepRecord, StepSurroundings
from stepscope.fix.saved.step_times import (
    CHECKED_AFTER,
    FOLLOWED,
    OUTDATED,
    PLAIN,
    AddedTime,
    PlanTries,
    StepWatch,
    Verdict,
    _Begun,
    latest_added_time,
)
from stepscope.records.change_values import MemoryTarget

if TYPE_CHECKING:
    from stepscope.fix.saved.planner import PlannedStep

MS = 10**6
STEP_NS = 20 * MS
LIMIT = MemoryTarget(max_slowdown=0.15)


class Event:
    """A mark on the device's clock; nobody may wait for it."""

    def __init__(self, at_ms: float, *, over: bool = True) -> None:
        self._at_ms, self._over = at_ms, over

    def query(self) -> bool:
        return self._over

    def elapsed_time(self, later: Event) -> float:
        assert self._over
        assert later._over
        return later._at_ms - self._at_ms

    def synchronize(self) -> None:
        raise AssertionError("a look must not wait")


def watched(*steps_ms: float, over: int, kinds: dict[int, str] | None = None) -> StepWatch:
    """The device is done with the first `over` marks."""
    watch = StepWatch()
    watch.device = torch.device("cuda")
    at_ms = 0.0
    for number, step_ms in enumerate((*steps_ms, 0.0)):
        mark = Event(at_ms, over=number < over)
        watch._passes.append(_Begun("key", (kinds or {}).get(number, FOLLOWED), mark))
        at_ms += step_ms
    return watch


def test_a_look_reads_the_latest_steps_that_are_over() -> None:
    watch = watched(9, 10, 11, 12, 13, over=5)
    assert watch.latest_steps_ns("key", FOLLOWED, 3) == [10 * MS, 11 * MS, 12 * MS]
    assert watch.latest_steps_ns("another", FOLLOWED, 3) == []
    kinds = {0: PLAIN, 1: OUTDATED}
    watch = watched(9, 10, 11, 12, 13, over=6, kinds=kinds)
    assert watch.latest_steps_ns("key", FOLLOWED, 9) == [11 * MS, 12 * MS, 13 * MS]


def test_too_few_steps_tell_nothing() -> None:
    few = CHECKED_AFTER // 2 - 1
    assert latest_added_time(watched(*[11] * few, over=few + 1), "key", 10 * MS) is None
    added = latest_added_time(watched(*[11] * (few + 1), over=few + 2), "key", 10 * MS)
    assert added == AddedTime(10 * MS, 11 * MS)


def test_looks_grow_rarer_and_two_slow_ones_in_a_row_count() -> None:
    looks = LaterLooks()
    assert not looks.is_due(FIRST_LOOK - 1)
    assert looks.is_due(FIRST_LOOK)
    assert not looks.seen(24, too_slow=False)
    assert looks.next_at == 48
    assert not looks.seen(48, too_slow=True)
    assert looks.suspects
    assert looks.next_at == 60
    assert not looks.seen(60, too_slow=False)
    assert not looks.suspects
    assert looks.next_at == 120
    assert not looks.seen(120, too_slow=True)
    assert looks.seen(132, too_slow=True)


def blocks() -> StepRecord:
    kinds: list[str | None] = ["heavy", None, None] * 16
    record = chain([MS] * (len(kinds) + 1), kinds, list(range(len(kinds) + 1)), took_ns=200_000)
    return replace(record, on_host=False, measured_step_ns=STEP_NS, watch_ns=7_000)


def shared(share: float) -> AddedTime:
    return AddedTime(STEP_NS, round(STEP_NS * (1 + share)))


def slowed() -> tuple[PlanTries, PlannedStep, Verdict]:
    """A plan that fitted took 20% longer later."""
    record, tries = blocks(), PlanTries(LIMIT)
    first = plan_step(record, LIMIT)
    accepted = tries.judge(record, first, shared(0.14))
    assert accepted.decided
    assert accepted.added == shared(0.14)
    again = tries.judge_again(record, first, shared(0.2))
    assert not again.decided
    return tries, first, again


def test_an_accepted_plan_that_became_slow_is_followed_by_a_smaller_one() -> None:
    tries, first, again = slowed()
    assert again.planned.load.device_ns < first.load.device_ns
    ended = tries.judge(again.record, again.planned, shared(0.13))
    assert ended.decided
    assert ended.planned is again.planned
    assert not ended.for_good


def test_where_a_smaller_plan_is_no_faster_the_larger_one_stays_for_good() -> None:
    """By less than half of what the device has to do less."""
    tries, first, again = slowed()
    less = (first.load.device_ns - again.planned.load.device_ns) / STEP_NS
    assert 0.2 - 0.4 * less > 0.15
    ended = tries.judge(again.record, again.planned, shared(0.2 - 0.4 * less))
    assert ended.decided
    assert ended.planned is first
    assert ended.for_good
    assert "Something else takes longer" in (ended.said or "")


def test_a_smaller_plan_that_is_faster_but_too_slow_is_made_smaller() -> None:
    tries, first, again = slowed()
    less = (first.load.device_ns - again.planned.load.device_ns) / STEP_NS
    third = tries.judge(again.record, again.planned, shared(max(0.151, 0.2 - 0.9 * less)))
    assert third.planned is not first
    assert third.planned.load.device_ns < again.planned.load.device_ns


@pytest.fixture
def slow_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None) -> None:
    """Plans do not count the host's part; tries find 9 times a plain step, where 10 are allowed."""
    monkeypatch.setattr(known_pass, "added_time", lambda *_: AddedTime(MS, 10 * MS))


def later(monkeypatch: pytest.MonkeyPatch, *shares: float) -> None:
    """Looks find these, and then nothing."""
    answers = iter(AddedTime(MS, round(MS * (1 + share))) for share in shares)
    monkeypatch.setattr(known_pass, "latest_added_time", lambda *_: next(answers, None))


BEFORE = 2  # passes: a plain one and the recorded one
TO_SECOND_LOOK = BEFORE + FIRST_LOOK + CHECKED_AFTER


def test_steps_that_stay_slow_lead_to_a_smaller_plan(
    monkeypatch: pytest.MonkeyPatch, slow_as_on_a_gpu: None
) -> None:
    later(monkeypatch, 11.0, 12.0)
    model, x = net()
    plain = trained(model, x, TO_SECOND_LOOK + 3)
    model, x = net()
    saver = save_memory(model, max_slowdown=10)
    seen = trained(model, x, TO_SECOND_LOOK - 1)
    plan = saver.plan
    assert plan is not None
    assert not saver.settled
    assert saver.notes == []
    seen += trained(model, x, 4)
    assert "steps took 1200% longer than plain ones" in saver.notes[0]
    assert saver.plan is not None
    assert saver.plan.peak_bytes > plan.peak_bytes
    assert same_bits(plain, seen)


def test_steps_that_are_slow_once_change_nothing(
    monkeypatch: pytest.MonkeyPatch, slow_as_on_a_gpu: None
) -> None:
    later(monkeypatch, 11.0, 9.9)
    model, x = net()
    saver = save_memory(model, max_slowdown=10)
    trained(model, x, BEFORE + FIRST_LOOK)
    plan = saver.plan
    assert not saver.settled
    trained(model, x, CHECKED_AFTER)
    assert saver.settled
    assert saver.plan is plan
    assert saver.notes == []


@pytest.mark.parametrize("wanted", ["bytes", "room"])
def test_where_memory_comes_first_the_plan_stays_and_its_time_is_noted(
    monkeypatch: pytest.MonkeyPatch, slow_as_on_a_gpu: None, wanted: str
) -> None:
    later(monkeypatch, 11.0, 12.0, 13.0)
    model, x = net()
    target: dict[str, Any] = {"max_slowdown": 10}
    if wanted == "bytes":
        target["reduce"] = 0.2
    else:
        monkeypatch.setattr(StepWatch, "has_room", lambda *_: False)
    saver = save_memory(model, **target)
    trained(model, x, TO_SECOND_LOOK - 1)
    plan = saver.plan
    trained(model, x, 2 * FIRST_LOOK)
    assert saver.plan is plan
    assert [("1200% longer" in one, "The plan stays" in one) for one in saver.notes] == [
        (True, True)
    ]
    assert saver.settled


def test_room_is_what_is_free_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """88 of 100 bytes may be planned with. A plan needs 60 where 20 were allocated before each
    pass: with 48 by now it needs 88."""
    monkeypatch.setattr("stepscope.fix.saved.step_times._limit_bytes", lambda _device: 100)
    recorded = StepSurroundings(begun_bytes=20, ended_bytes=50, gradient_bytes=0, limit_bytes=100)
    watch = StepWatch()
    watch.begun_bytes = 48
    assert watch.has_room(recorded, 60)
    assert not watch.has_room(recorded, 61)
    assert watch.has_room(replace(recorded, expandable=True), 64)
    assert watch.has_room(None, 61)
    assert watch.has_room(recorded, None)


def test_once_a_plan_was_tried_its_own_steps_are_promised() -> None:
    planned = plan_step(blocks(), LIMIT)
    before = promise(planned, step_ns=STEP_NS)
    assert before.step_ns == before.planned_step_ns == STEP_NS + planned.plan.extra_ns
    assert not before.tried_step
    after = promise(planned, step_ns=STEP_NS, added=AddedTime(STEP_NS, 22 * MS, MS))
    assert (after.step_low_ns, after.step_ns, after.step_high_ns) == (21 * MS, 22 * MS, 23 * MS)
    assert after.planned_step_ns == before.step_ns
    assert after.tried_step


def test_what_the_host_needs_beyond_its_slack_is_promised() -> None:
    """Following the plan takes the host 3 ms; it is 1 ms ahead, and the device does 1 ms more."""
    planned = replace(plan_step(blocks(), LIMIT), host_late_ns=0)
    planned = replace(planned, plan=replace(planned.plan, extra_ns=MS))
    late = replace(planned, host_late_ns=2 * MS)
    assert promise(planned, step_ns=STEP_NS).step_ns == STEP_NS + MS
    assert promise(late, step_ns=STEP_NS).step_ns == STEP_NS + 2 * MS
    record = replace(blocks(), repeat_ns=100_000, replace_ns=30_000, host_slack_ns=0)
    host = plan_step(record, LIMIT)
    assert host.host_late_ns == host.load.host_ns > 0
    unknown = plan_step(replace(record, host_slack_ns=None), LIMIT)
    assert unknown.host_late_ns == 0
