"""The host's own time of a step, with a made-up device whose waits are known."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.measure.session import special_steps
from stepscope.measure.session.special_steps import PHASES, HostStep

torch = pytest.importorskip("torch")
WAIT_S = 0.05


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Every synchronize takes a while and is counted."""
    made = SimpleNamespace(waits=0, capturing=False)

    def synchronize() -> None:
        made.waits += 1
        time.sleep(WAIT_S)

    # Another test of this process may have compiled something, which would leave modules alone.
    monkeypatch.setattr(special_steps, "has_compiled", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    return made


def train(step: HostStep, model: Any) -> Any:
    step.begin()
    loss = model(torch.randn(4, 8)).square().mean()
    step.pass_begins([loss])
    step.phase("backward", entering=True)
    loss.backward()
    step.phase("backward", entering=False)
    step.phase("optimizer", entering=True)
    step.phase("optimizer", entering=False)
    return step.end()


def layers(count: int) -> Any:
    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(count)))


def test_waits_are_in_no_phase(device: SimpleNamespace) -> None:
    measured = train(HostStep(fine=True, alone=True), layers(40))
    own_ns = sum(measured[f"{phase}_ns"] for phase in PHASES)
    assert measured["stops"] == device.waits - 1  # the first one is before the step
    assert measured["stops"] >= 4 + 40 // 16  # phases, and every sixteenth module
    assert measured["wait_ns"] >= 0.9e9 * WAIT_S * measured["stops"]
    assert measured["forward_ns"] > 0
    assert measured["backward_ns"] > 0
    assert own_ns < measured["wait_ns"] * 100


def test_the_queue_is_emptied_in_the_middle_of_a_long_backward(device: SimpleNamespace) -> None:
    short = train(HostStep(fine=False, alone=True), layers(2))["stops"]
    long = train(HostStep(fine=False, alone=True), layers(150))["stops"]
    assert long > short


def test_gradients_are_the_same_and_nothing_is_left_behind(device: SimpleNamespace) -> None:
    model, names = layers(70), ("item", "__bool__", "_call_impl")
    owners = (torch.Tensor, torch.Tensor, torch.nn.Module)
    before = [getattr(owner, name) for owner, name in zip(owners, names, strict=True)]
    torch.manual_seed(1)
    train(HostStep(fine=True, alone=True), model)
    watched = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)
    model(torch.randn(4, 8)).square().mean().backward()
    for mine, plain in zip(watched, model.parameters(), strict=True):
        assert torch.equal(mine, plain.grad)
    after = [getattr(owner, name) for owner, name in zip(owners, names, strict=True)]
    assert after == before
    assert "item" not in vars(torch.Tensor)


def test_a_call_that_blocks_waits_before_it_and_is_counted(device: SimpleNamespace) -> None:
    step = HostStep(fine=False, alone=True)
    step.begin()
    read = step._first_drained(lambda value: value.number)
    assert read(SimpleNamespace(is_cuda=True, number=7)) == 7
    assert read(SimpleNamespace(is_cuda=False, number=8)) == 8
    assert step.end()["blocking"] == 1


def test_with_other_ranks_only_the_start_is_emptied(device: SimpleNamespace) -> None:
    measured = train(HostStep(fine=True, alone=False), layers(150))
    assert device.waits == 1
    assert measured["stops"] == 0
    assert not measured["fine"]


def test_nothing_waits_while_a_cuda_graph_is_captured(device: SimpleNamespace) -> None:
    device.capturing = True
    assert train(HostStep(fine=True, alone=True), layers(2)) is None
    assert device.waits == 0
