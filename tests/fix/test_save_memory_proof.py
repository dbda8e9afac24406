"""save_memory recomputes only from what cannot change until backward, and harms no training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from random_nets import same_bits
from torch import nn
from torch.nn import functional

from stepscope.fix import save_memory
from stepscope.fix.saved import MemorySaver, memory_saver, planner
from stepscope.fix.saved.encodings.registry import EncodingTrials
from stepscope.fix.saved.follower import PlanFollower
from stepscope.fix.saved.memory_model import BackwardModel
from stepscope.fix.saved.recorder import StepRecorder
from stepscope.fix.saved.replay import CallTemplate
from stepscope.fix.saved.selection import StepCuts

STEPS = 8
OPTIONS: list[dict[str, Any]] = [{}, {"warmup": 0}, {"reduce": 0.5}, {"heavy": True}]
Step = Callable[[nn.Module, int], torch.Tensor]


def one_pass(model: nn.Module, step: int) -> torch.Tensor:
    del step
    return model(torch.randn(64, 16)).float().square().mean()


def trained(model: nn.Module, step: Step = one_pass) -> list[torch.Tensor]:
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = step(model, number)
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return [*seen, *(value.clone() for value in model.state_dict().values())]


def check(make: Callable[[], nn.Module], step: Step = one_pass) -> list[MemorySaver]:
    """The same as plain training, to the last bit, with every set of options."""
    torch.manual_seed(0)
    first = make()
    plain = trained(copy.deepcopy(first), step)
    savers = []
    for options in OPTIONS:
        model = copy.deepcopy(first)
        savers.append(save_memory(model, **options))
        assert same_bits(plain, trained(model, step)), options
        assert savers[-1].ended is None
    return savers


class Masked(nn.Module):
    """The product of weight and mask is kept by autograd, and can be had again from both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.register_buffer("mask", (torch.rand(16, 16) > 0.5).float())
        self.end = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = functional.linear(x, self.weight * self.mask)
            x = torch.tanh(x * self.mask[0] + self.end.bias[0]).relu().sin()
        return self.end(x)


@pytest.mark.parametrize("kind", ["assigned", "scaled", "weight", "bias"])
def test_memory_that_changes_without_a_version_before_backward(kind: str) -> None:
    def step(model: Any, number: int) -> torch.Tensor:
        loss = one_pass(model, number)
        if kind == "assigned":
            model.mask.data = (torch.rand(16, 16) > 0.5).float()
        elif kind == "scaled":
            model.mask.data.mul_(0.9)
        else:
            getattr(model.end if kind == "bias" else model, kind).data.mul_(0.99)
        return loss

    savers = check(Masked, step)
    assert any(saver.plan is not None and saver.plan.changes_something() for saver in savers)


class WithArray(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.end = nn.Linear(16, 16), nn.Linear(16, 4)
        self.array = np.ones(16, dtype=np.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.from_numpy(self.array)
        hidden = torch.sigmoid(self.inner(x) * scale.clone() + scale)
        self.array *= 0.9
        return self.end((hidden * scale.clone()).tanh())


def test_a_constant_over_a_numpy_array_that_forward_changes() -> None:
    check(WithArray)


class Counting(nn.Module):
    """Forward writes to buffers, and reads them between the writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.end = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.passes += 1
        hidden = (self.inner(x) * self.mean.clone()).tanh() + self.passes.to(x.dtype)
        return self.end(functional.silu(hidden))


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 128, max_norm=1.0)
        self.end = nn.Linear(128, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x * 50).long().abs() % 200
        return self.end(functional.gelu(self.words(chosen).mean(1)).sigmoid())


@pytest.mark.parametrize("make", [Counting, Renormed, Masked])
@pytest.mark.parametrize("between", ["second forward", "evaluation"])
def test_two_passes_before_a_backward(make: Callable[[], nn.Module], between: str) -> None:
    def step(model: nn.Module, number: int) -> torch.Tensor:
        loss = one_pass(model, number)
        if between == "second forward":
            return loss + one_pass(model, number)
        model.eval()
        with torch.no_grad():
            model(torch.randn(64, 16))
        model.train()
        return loss

    check(make, step)


def test_batch_norm_without_weights_under_autocast() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            *(nn.Linear(16, 64), nn.BatchNorm1d(64, affine=False), nn.ReLU()),
            *(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.SiLU(), nn.Linear(64, 4)),
        )

    def step(model: nn.Module, number: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return one_pass(model, number)

    check(make, step)


class Talking(nn.Module):
    """Returns the scores beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.end = nn.Linear(16, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.end(torch.tanh(self.inner(x)))
        return scores.log_softmax(-1).exp().square().mean(), scores


def test_the_caller_may_change_what_the_pass_returned() -> None:
    def step(model: nn.Module, number: int) -> torch.Tensor:
        loss, scores = model(torch.randn(64, 16))
        with torch.no_grad():
            scores.mul_(0.5)
        return loss

    check(Talking, step)


class PartlyCompiled(nn.Module):
    """The second backend call is counted by `runs`: how often compiled code ran."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.runs = 0
        self.inner, self.end = nn.Linear(16, 16), nn.Linear(16, 4)
        block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16))
        self.block = block
        if kind == "module":
            self.block = torch.compile(block, backend=self.backend)
        elif kind == "method":
            self.block.compile(backend=self.backend)
        else:
            self.function = torch.compile(lambda x: (x.sin() * 2).relu(), backend=self.backend)

    def backend(self, graph: Any, inputs: Any) -> Any:
        del inputs

        def run(*given: Any) -> Any:
            self.runs += 1
            return graph(*given)

        return run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sigmoid(self.block(self.inner(x)))
        if hasattr(self, "function"):
            hidden = self.function(hidden)
        return self.end(hidden.relu())


@pytest.mark.filterwarnings("ignore")  # of dynamo itself
@pytest.mark.parametrize("kind", ["module", "method", "function"])
@pytest.mark.parametrize("warmup", [0, 1])
def test_compiled_parts_stay_compiled(kind: str, warmup: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = PartlyCompiled(kind)
    torch.manual_seed(0)
    model = PartlyCompiled(kind)
    saver = save_memory(model, warmup=warmup)
    assert same_bits(trained(plain), trained(model))
    assert plain.runs == model.runs
    if kind != "function":
        assert saver.ended is not None
        assert saver.ended.startswith("part of the model is compiled (block)")
    torch._dynamo.reset()


def broken(*given: Any, **named: Any) -> Any:
    del given, named
    raise ValueError("a defect of ours")


# Every stage: recognise, record, plan, follow, count.
PLACES = [
    (memory_saver, "pass_key"),
    (memory_saver, "compiled_part"),
    (memory_saver, "following_costs"),
    (memory_saver, "BackwardReadings"),
    (memory_saver, "plan_step"),
    (memory_saver.MemorySaver, "_owned"),
    (memory_saver.MemorySaver, "_end_recorded"),
    (memory_saver.MemorySaver, "_end_followed"),
    (memory_saver.StepWatch, "begins"),
    (memory_saver.StepWatch, "surroundings"),
    (StepRecorder, "__init__"),
    (StepRecorder, "_note"),
    (StepRecorder, "_note_use"),
    (StepRecorder, "_read_graph"),
    (StepRecorder, "finish"),
    (EncodingTrials, "try_content"),
    (EncodingTrials, "options"),
    (StepCuts, "__init__"),
    (StepCuts, "select"),
    (BackwardModel, "memory"),
    (planner, "rows"),
    (planner, "plan_timeline"),
    (memory_saver.FollowedPlan, "of"),
    (PlanFollower, "__init__"),
    (PlanFollower, "_pack"),
    (PlanFollower, "_follow"),
    (PlanFollower, "finish"),
    (CallTemplate, "of"),
]


@pytest.mark.parametrize(("place", "name"), PLACES)
def test_a_failure_of_ours_ends_the_remedy_and_not_the_training(
    place: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    block = nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Tanh(), nn.Dropout(0.1)
    plain = nn.Sequential(*(part for _ in range(4) for part in copy.deepcopy(block)))
    model = copy.deepcopy(plain)
    expected = trained(plain)
    monkeypatch.setattr(place, name, broken)
    saver = save_memory(model)
    assert same_bits(expected, trained(model))
    assert saver.ended is not None
    assert "a defect of ours" in saver.notes[-1]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_dispatch_stack() == 0
