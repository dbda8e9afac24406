"""save_memory measures its own steps: a plan that is slower than allowed is made again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from random_nets import same_bits
from saved_trainings import as_on_a_gpu as as_on_a_gpu
from saved_trainings import net, trained

from stepscope.fix import save_memory
from stepscope.fix.saved import known_pass
from stepscope.fix.saved.known_pass import FIRST_LOOK
from stepscope.fix.saved.step_times import (
    CHECKED_AFTER,
    FOLLOWED,
    MOST_CHECKED,
    MOST_TRIES,
    PLAIN,
    SETTLING,
    AddedTime,
    StepWatch,
    added_by,
    added_time,
    is_clear,
    is_surely_too_slow,
    is_too_slow,
    stretches_ns,
)
from stepscope.records.change_values import MemoryTarget

if TYPE_CHECKING:
    pass


def slower_by(monkeypatch: pytest.MonkeyPatch, *shares: float) -> None:
    """Than plain steps, in tries. Later looks find nothing."""
    answers = iter(shares)
    monkeypatch.setattr(known_pass, "latest_added_time", lambda *_: None)
    monkeypatch.setattr(
        known_pass,
        "added_time",
        lambda *_: AddedTime(1_000_000, round(1e6 + 1e6 * next(answers))),
    )


def test_a_plan_that_keeps_within_its_time_stays(
    monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None
) -> None:
    slower_by(monkeypatch, 10.0)
    model, x = net()
    saver = save_memory(model, max_slowdown=10)
    trained(model, x, 3)
    plan = saver.plan
    assert not saver.settled
    trained(model, x, CHECKED_AFTER + 3)
    assert saver.plan is plan
    assert not saver.settled
    trained(model, x, FIRST_LOOK - CHECKED_AFTER)
    assert saver.plan is plan
    assert saver.notes == []
    assert saver.settled


def test_a_slow_plan_is_made_again_until_the_tries_are_used_up(
    monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None
) -> None:
    steps = (MOST_TRIES + 1) * (CHECKED_AFTER + 2)
    slower_by(monkeypatch, *[11.0, 12.0] * MOST_TRIES)
    model, x = net()
    plain = trained(model, x, steps)
    model, x = net()
    saver = save_memory(model, max_slowdown=10)
    first = trained(model, x, CHECKED_AFTER + 2)
    assert len(saver.notes) == 1
    assert "steps took 1100% longer than plain ones" in saver.notes[0]
    assert "planned again" in saver.notes[0]
    assert not saver.settled
    rest = trained(model, x, steps - CHECKED_AFTER - 2)
    assert "everything stays saved" in saver.notes[-1]
    assert saver.settled
    assert saver.plan is not None
    assert not saver.plan.changes_something()
    assert same_bits(plain, [*first, *rest])


def test_after_slow_plans_the_best_one_that_fitted_is_followed(
    monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None
) -> None:
    steps = (MOST_TRIES + 1) * (CHECKED_AFTER + 2)
    slower_by(monkeypatch, 11.0, 5.0, *[11.0] * MOST_TRIES)
    model, x = net()
    plain = trained(model, x, steps)
    model, x = net()
    saver = save_memory(model, max_slowdown=10)
    followed = trained(model, x, 2 * CHECKED_AFTER + 1)
    fitted = saver.plan
    followed += trained(model, x, steps - 2 * CHECKED_AFTER - 1)
    assert saver.settled
    assert saver.plan is fitted
    assert same_bits(plain, followed)


def test_without_a_limit_nothing_is_checked(
    monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None
) -> None:
    slower_by(monkeypatch, 5.0)
    model, x = net()
    saver = save_memory(model)
    trained(model, x, CHECKED_AFTER + 4)
    assert saver.notes == []


def test_at_most_means_at_most_with_the_doubt() -> None:
    limited = MemoryTarget(max_slowdown=0.05)
    steps = [AddedTime(1000, slower) for slower in (1050, 1051)]
    assert [is_too_slow(added, limited) for added in steps] == [False, True]
    doubtful = [AddedTime(1000, 1040, doubt_ns) for doubt_ns in (10, 11)]
    assert [is_too_slow(added, limited) for added in doubtful] == [False, True]
    assert not is_too_slow(AddedTime(1000, 9000), MemoryTarget())


def test_an_accepted_plan_is_given_up_only_beyond_the_doubt() -> None:
    limited = MemoryTarget(max_slowdown=0.05)
    steps = [AddedTime(1000, 1060, doubt_ns) for doubt_ns in (9, 10, 20)]
    assert [is_surely_too_slow(added, limited) for added in steps] == [True, False, False]


def test_a_limit_within_the_doubt_tells_nothing_yet() -> None:
    limited = MemoryTarget(max_slowdown=0.05)
    assert is_clear(AddedTime(1000, 1040, 10), limited)
    assert is_clear(AddedTime(1000, 1100, 50), limited)
    assert not is_clear(AddedTime(1000, 1040, 11), limited)
    assert not is_clear(AddedTime(1000, 1060, 11), limited)
    assert is_clear(AddedTime(1000, 1050), limited)


def test_the_doubt_is_two_standard_errors_of_stretches() -> None:
    """Stretches of 100, 102 and 104 deviate by 2; three steps are one that stands for itself."""
    added = added_by([99, 100, 101, 105, 106], 100)
    assert added.followed_ns == 102
    assert added.doubt_ns == round(2 * 2 / (5 / 3) ** 0.5)
    assert added_by([103, 103, 160, 103, 103, 160, 103, 103, 160], 100).doubt_ns == 0
    assert added_by([103, 104], 100).doubt_ns == 1
    assert added_by([103], 100).doubt_ns == 0


def test_a_plan_of_unclear_time_is_watched_longer(
    monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None
) -> None:
    model, x = net()
    saver = save_memory(model, max_slowdown=10)
    unclear = AddedTime(1000, 10_900, 200)
    monkeypatch.setattr(known_pass, "added_time", lambda *_: unclear)
    trained(model, x, 2)
    for _ in range(MOST_CHECKED - 1):
        trained(model, x, 1)
        assert saver.notes == []
        assert not saver.settled
    trained(model, x, 1)
    assert "steps took 990% longer than plain ones: planned again" in saver.notes[0]


WATCHED = [900] * SETTLING  # a plan's first steps are slower: the host sees every operator


def test_steps_are_judged_by_their_mean_as_trainings_take_them() -> None:
    """The host is late in one step of three: neither the fastest nor the usual one tells."""
    uneven = [103, 103, 160, 104, 103, 160, 103, 104, 160]
    added = added_time(Timed({PLAIN: [140, 100, 100, 100], FOLLOWED: [*WATCHED, *uneven]}), "key")
    assert added is not None
    assert added.share == pytest.approx(0.22)


def test_a_disturbed_step_does_not_count() -> None:
    steps = [*WATCHED, 103, 400, 103, 103, 103, 103, 103, 103, 103, 103]
    added = added_time(Timed({PLAIN: [100, 100, 100, 500], FOLLOWED: steps}), "key")
    assert added is not None
    assert added.share == pytest.approx(0.03)


def test_nothing_is_judged_before_both_kinds_of_steps_were_timed() -> None:
    assert added_time(Timed({PLAIN: [100], FOLLOWED: []}), "key") is None
    assert added_time(Timed({PLAIN: [100], FOLLOWED: WATCHED}), "key") is None
    assert added_time(Timed({PLAIN: [], FOLLOWED: [*WATCHED, 100]}), "key") is None


def test_few_steps_count_one_by_one() -> None:
    assert stretches_ns([100, 120]) == [100, 120]
    assert stretches_ns([100, 120, 140, 160]) == [120, 140]


def test_the_hosts_slack_is_that_of_its_fastest_plain_step() -> None:
    watch = Timed({PLAIN: [100, 100, 100]})
    for host_ns in (0, 95, 155, 255):
        watch.begins("key", torch.device("cpu"))
        watch.begins("key", torch.device("cpu")) if not watch._passes else None
        watch._passes[-1].host_ns = host_ns
    assert watch.host_slack_ns("key") == 40
    watch._passes[2].host_ns = 190  # the host needs as long as the device: who waits is not known
    watch._passes[3].host_ns = 290
    assert watch.host_slack_ns("key") is None
    assert watch.host_slack_ns("another") is None


class Timed(StepWatch):
    """Steps of known lengths."""

    def __init__(self, steps: dict[str, list[int]]) -> None:
        super().__init__()
        self._steps = steps

    def steps_ns(self, key: object, kind: str) -> list[int]:
        del key
        return self._steps[kind]
