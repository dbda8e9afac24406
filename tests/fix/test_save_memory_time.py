"""save_memory measures its own steps on a GPU, and corrects a plan that is slower than allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_nets import same_bits
from saved_trainings import net, trained

from stepscope.fix import save_memory
from stepscope.fix.saved import MemorySaver
from stepscope.fix.saved.step_times import FOLLOWED, PLAIN, StepWatch

ENOUGH = 20  # steps: plain ones, the recorded one, and those that are timed


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, slower: float) -> None:
    """Steps with a plan take so much longer than plain ones."""

    def step_ns(self: StepWatch, key: Any, kind: str) -> int | None:
        del self, key
        return {PLAIN: 1_000_000, FOLLOWED: round(1e6 * (1 + slower))}.get(kind)

    monkeypatch.setattr(MemorySaver, "_is_timed", lambda _saver: True)
    monkeypatch.setattr(StepWatch, "step_ns", step_ns)


def check(monkeypatch: pytest.MonkeyPatch, slower: float) -> MemorySaver:
    model, x = net()
    plain = trained(model, x, ENOUGH)
    as_on_a_gpu(monkeypatch, slower)
    model, x = net()
    saver = save_memory(model, max_slowdown=10)
    first = trained(model, x, 5)
    assert not saver.settled
    assert same_bits(plain, [*first, *trained(model, x, ENOUGH - 5)])
    assert saver.settled
    return saver


def test_a_plan_that_keeps_within_its_time_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    saver = check(monkeypatch, 9.0)
    assert saver.notes == []
    assert saver.plan is not None
    assert saver.plan.changes_something()
    assert saver.promise is not None
    assert saver.promise.tried_step
    assert saver.promise.step_ns == 10_000_000


@pytest.mark.parametrize("slower", [30.0, 1e9])
def test_a_slow_plan_is_corrected_once(monkeypatch: pytest.MonkeyPatch, slower: float) -> None:
    saver = check(monkeypatch, slower)
    assert len(saver.notes) == 1
    assert "longer than plain ones, 1000% are allowed" in saver.notes[0]
    assert saver.plan is not None
    if not saver.plan.changes_something():
        assert "everything stays saved" in saver.notes[0]
        assert "compile=True" in saver.notes[0]
    assert saver.plan.changes_something() or slower > 1e6


def test_without_a_limit_nothing_is_checked() -> None:
    model, x = net()
    saver = save_memory(model)
    trained(model, x, ENOUGH)
    assert saver.notes == []


def test_the_hosts_slack_is_that_of_its_fastest_plain_step() -> None:
    watch = StepWatch()
    for number in range(5):
        watch.begins("key", torch.device("cpu"))
        if number:
            watch._passes[-1].mark, watch._passes[-1].host_ns = 100 * number, 60 * number
    assert watch.step_ns("key", PLAIN) == 100
    assert watch.slack_ns("key") == 0  # on a CPU there is none
    watch.device = torch.device("cuda")
    watch.step_ns = lambda _key, _kind: 100  # type: ignore[method-assign]
    assert watch.slack_ns("key") == 40
    for one in watch._passes:  # the host needs as long as the device: who waits is not known
        one.host_ns = one.mark
    assert watch.slack_ns("key") == 0
