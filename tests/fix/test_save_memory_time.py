"""save_memory measures its own steps: a plan that is slower than allowed is made again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from random_nets import same_bits
from step_chains import chain
from torch import nn

from stepscope.fix import save_memory
from stepscope.fix.saved import following_costs as following_costs_module
from stepscope.fix.saved import memory_saver
from stepscope.fix.saved.choose import make_plan
from stepscope.fix.saved.following_costs import FollowingCosts, following_ns
from stepscope.fix.saved.hook_pauses import HOOKED_FOR_EACH
from stepscope.fix.saved.memory_saver import MemorySaver
from stepscope.fix.saved.save_plan import KEEP, RECOMPUTE, PlannedRepeat, PlannedUse, SavePlan
from stepscope.fix.saved.step_watch import FOLLOWED, PLAIN, StepWatch
from stepscope.fix.saved.time_limit import (
    CHECKED_AFTER,
    MOST_TRIES,
    AddedTime,
    added_time,
    is_too_slow,
    with_measured_time,
)
from stepscope.records.memory_targets import MemoryTarget

if TYPE_CHECKING:
    from stepscope.fix.saved.known_pass import KnownPass
    from stepscope.fix.saved.step_record import StepRecord


def net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    return nn.Sequential(*layers), torch.randn(512, 64)


def trained(model: nn.Module, x: torch.Tensor, steps: int) -> list[torch.Tensor]:
    seen = []
    for _ in range(steps):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return seen


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans do not count the host's part."""
    completed = MemorySaver._completed

    def of_a_gpu(self: MemorySaver, record: StepRecord, known: KnownPass) -> StepRecord:
        return replace(completed(self, replace(record, on_host=False), known), on_host=False)

    monkeypatch.setattr(MemorySaver, "_completed", of_a_gpu)


def slower_by(monkeypatch: pytest.MonkeyPatch, *shares: float) -> None:
    answers = iter(shares)
    monkeypatch.setattr(
        memory_saver,
        "added_time",
        lambda *_: AddedTime(1_000_000, round(1e6 + 1e6 * next(answers))),
    )


def test_a_plan_that_keeps_within_its_time_stays(
    monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None
) -> None:
    slower_by(monkeypatch, 10.004)
    model, x = net()
    saver = save_memory(model, max_slowdown=10)
    trained(model, x, 3)
    plan = saver.plan
    assert not saver.settled
    trained(model, x, CHECKED_AFTER + 3)
    assert saver.plan is plan
    assert saver.notes == []
    assert saver.settled


def test_a_slow_plan_is_made_again_and_given_up_the_third_time(
    monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None
) -> None:
    slower_by(monkeypatch, 11.0, 11.0, 12.0)
    model, x = net()
    plain = trained(model, x, 4 * CHECKED_AFTER)
    model, x = net()
    saver = save_memory(model, max_slowdown=10)
    first = trained(model, x, CHECKED_AFTER + 2)
    assert len(saver.notes) == 1
    assert "steps took 1100% longer than plain ones" in saver.notes[0]
    assert "planned again" in saver.notes[0]
    assert not saver.settled
    rest = trained(model, x, 3 * CHECKED_AFTER - 2)
    assert "everything is kept from now on" in saver.notes[-1]
    assert saver.settled
    assert same_bits(plain, [*first, *rest])


def test_without_a_limit_nothing_is_checked(
    monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None
) -> None:
    slower_by(monkeypatch, 5.0)
    model, x = net()
    saver = save_memory(model)
    trained(model, x, CHECKED_AFTER + 4)
    assert saver.notes == []


def test_what_is_too_slow() -> None:
    limited = MemoryTarget(max_slowdown=0.05)
    steps = [AddedTime(1000, slower) for slower in (1050, 1054, 1060)]
    assert [is_too_slow(added, limited) for added in steps] == [False, False, True]
    assert not is_too_slow(AddedTime(1000, 9000), MemoryTarget())
    last = [AddedTime(1000, slower) for slower in (1060, 1069, 1071)]
    assert [is_too_slow(added, limited, tries=MOST_TRIES) for added in last] == [False, False, True]


def test_a_disturbed_step_does_not_count() -> None:
    added = added_time(Timed({PLAIN: [100, 104], FOLLOWED: [900, 103, 400]}), "key")
    assert added is not None
    assert added.share == pytest.approx(0.03)
    assert added_time(Timed({PLAIN: [100], FOLLOWED: []}), "key") is None


# What slow steps show. The device's part of the plan takes 1 ms; its 10 uses that are not kept and
# 5 repeated operators cost the host 10 x (21 + 29) + 5 x 100 us = 1 ms.

COSTS = FollowingCosts(watch_ns=21_000 // HOOKED_FOR_EACH, replace_ns=29_000, repeat_ns=100_000)


def on_a_gpu(**facts: Any) -> StepRecord:
    return replace(chain([1] * 1001, ["heavy"] * 1000, list(range(1000))), on_host=False, **facts)


def planned(extra_ns: int = 1_000_000) -> SavePlan:
    kept = PlannedUse(after=0, shape=(1,), dtype="float32", action=KEEP, encoding=None)
    changed = replace(kept, action=RECOMPUTE)
    repeats = [PlannedRepeat(operator=n, recomputed_inputs=()) for n in range(5)]
    plan = make_plan(chain([1, 1], ["heavy"], [0]), MemoryTarget())
    uses = (*[changed] * 10, *[kept] * 990)
    return replace(plan, uses=uses, repeated=tuple(repeats), extra_ns=extra_ns)


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following_costs_module, "following_costs", lambda: COSTS)


def test_operators_that_take_longer_beside_others_count_as_dearer(known_costs: None) -> None:
    shown = with_measured_time(on_a_gpu(), planned(), AddedTime(20_000_000, 21_200_000))
    assert shown.dearer == pytest.approx(1.2)
    assert shown.slack_ns is None


def test_where_the_host_holds_up_training_its_slack_is_known(known_costs: None) -> None:
    plan = planned(extra_ns=100_000)
    shown = with_measured_time(on_a_gpu(), plan, AddedTime(20_000_000, 20_700_000))
    assert shown.slack_ns == 300_000  # of the 1 ms, 0.7 were added
    assert shown.repeat_ns == COSTS.repeat_ns
    assert following_ns(shown, plan) == 1_000_000


def test_without_slack_the_hosts_costs_are_dearer_than_known(known_costs: None) -> None:
    plan = planned(extra_ns=100_000)
    shown = with_measured_time(on_a_gpu(), plan, AddedTime(20_000_000, 24_000_000))
    assert shown.slack_ns == 0
    assert following_ns(shown, plan) == 4_000_000


def test_a_plan_that_counted_the_host_learns_more_about_the_host(known_costs: None) -> None:
    plan = planned(extra_ns=700_000)
    counted = on_a_gpu(slack_ns=300_000)
    shown = with_measured_time(counted, plan, AddedTime(20_000_000, 20_900_000))
    assert shown.slack_ns == 100_000
    assert shown.dearer == 1.0


class Timed(StepWatch):
    """Steps of known lengths."""

    def __init__(self, steps: dict[str, list[int]]) -> None:
        super().__init__()
        self._steps = steps

    def steps_ns(self, key: object, kind: str) -> list[int]:
        del key
        return self._steps[kind]
