"""save_memory measures its own steps: a plan that is slower than allowed is made again."""

from __future__ import annotations

import pytest
import torch
from random_nets import same_bits
from torch import nn

from stepscope.fix import save_memory
from stepscope.fix.saved import memory_saver
from stepscope.fix.saved.step_record import StepRecord
from stepscope.fix.saved.step_watch import FOLLOWED, PLAIN, StepWatch
from stepscope.fix.saved.time_limit import CHECKED_AFTER, is_too_slow, measured_slowdown
from stepscope.records.memory_targets import MemoryTarget


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
    """The first plan does not count the host's part."""
    with_costs = memory_saver.with_host_costs
    calls: list[StepRecord] = []

    def only_later(record: StepRecord) -> StepRecord:
        calls.append(record)
        return record if len(calls) == 1 else with_costs(record)

    monkeypatch.setattr(memory_saver, "with_host_costs", only_later)


def slower_by(monkeypatch: pytest.MonkeyPatch, *measured: float) -> None:
    answers = iter(measured)
    monkeypatch.setattr(memory_saver, "measured_slowdown", lambda *_: next(answers))


def test_a_plan_that_keeps_within_its_time_stays(
    monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None
) -> None:
    slower_by(monkeypatch, 10.01)
    model, x = net()
    saver = save_memory(model, max_slowdown=10)
    trained(model, x, 3)
    plan = saver.plan
    trained(model, x, CHECKED_AFTER + 3)
    assert saver.plan is plan
    assert saver.notes == []


def test_a_slow_plan_is_made_again_and_given_up_the_second_time(
    monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None
) -> None:
    slower_by(monkeypatch, 11.0, 12.0)
    model, x = net()
    plain = trained(model, x, 3 * CHECKED_AFTER)
    model, x = net()
    saver = save_memory(model, max_slowdown=10)
    first = trained(model, x, CHECKED_AFTER + 2)
    assert len(saver.notes) == 1
    assert "steps took 1100% longer than plain ones" in saver.notes[0]
    assert "planned again" in saver.notes[0]
    rest = trained(model, x, 2 * CHECKED_AFTER - 2)
    assert "everything is kept from now on" in saver.notes[1]
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
    assert [is_too_slow(by, limited) for by in (None, 0.05, 0.06, 0.08)] == [False] * 3 + [True]
    assert not is_too_slow(9.0, MemoryTarget())


def test_a_disturbed_step_does_not_count() -> None:
    watch = Timed({PLAIN: [100, 104], FOLLOWED: [900, 103, 400]})
    assert measured_slowdown(watch, "key") == pytest.approx(0.03)
    assert measured_slowdown(Timed({PLAIN: [100], FOLLOWED: []}), "key") is None


class Timed(StepWatch):
    """Steps of known lengths."""

    def __init__(self, steps: dict[str, list[int]]) -> None:
        super().__init__()
        self._steps = steps

    def steps_ns(self, key: object, kind: str) -> list[int]:
        del key
        return self._steps[kind]
