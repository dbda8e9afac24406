"""save_memory on nets as others write them; results stay the same, and the plan is followed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from stepscope.fix import save_memory
from stepscope.fix.saved.memory_saver import MemorySaver
from stepscope.fix.saved.planner import make_plan
from stepscope.fix.saved.step_times import following_costs
from stepscope.records.change_values import MemoryTarget


class VolumeBlock(nn.Module):
    """The activation works in place: its operators have to be watched in every pass."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Conv3d(before, after, 3, padding=1)
        self.norm = nn.BatchNorm3d(after)
        self.second = nn.Conv3d(after, after, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(functional.leaky_relu(self.norm(self.first(x)), 0.1, inplace=True))


class VolumeNet(nn.Module):
    """Pools between its blocks, in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(VolumeBlock(n, 8) for n in (3, 8, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = functional.avg_pool3d(block(x), 3, stride=1, padding=1)
        return x


def train_volumes(*, save: bool) -> tuple[list[torch.Tensor], MemorySaver | None]:
    torch.manual_seed(0)
    model = VolumeNet()
    saver = save_memory(model) if save else None
    results = []
    for _ in range(6):
        model.zero_grad()
        model(torch.randn(2, 3, 4, 8, 8)).square().mean().backward()
        results += [p.grad for p in model.parameters() if p.grad is not None]
    return [*results, *model.buffers()], saver


def test_what_is_proven_inside_a_watched_module_does_not_disturb_its_count() -> None:
    expected, _ = train_volumes(save=False)
    found, saver = train_volumes(save=True)
    assert all(map(torch.equal, found, expected))
    assert saver is not None
    assert saver.notes == []
    assert saver.plan is not None
    assert saver.held_bytes is not None
    assert saver.held_bytes < 0.6 * saver.plan.saved_bytes_before
    encoded = [use.encoding for use in saver.plan.uses]
    assert "shape" in encoded


def test_two_nets_and_two_optimizers_train_against_each_other() -> None:
    expected, _ = train_adversaries(save=False)
    found, savers = train_adversaries(save=True)
    assert all(map(torch.equal, found, expected))
    assert [saver.notes for saver in savers] == [[], []]
    plan = savers[0].plan
    assert plan is not None
    assert savers[0].held_bytes == plan.saved_bytes < plan.saved_bytes_before


def train_adversaries(*, save: bool) -> tuple[list[torch.Tensor], list[MemorySaver]]:
    """The second net sees three batches before its backward, one with a second derivative."""
    torch.manual_seed(0)
    maker = nn.Sequential(
        *(nn.ConvTranspose2d(8, 16, 4), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        *(nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.SiLU()),
        *(nn.ConvTranspose2d(8, 2, 4, 2, 1), nn.Tanh()),
    )
    judge = nn.Sequential(
        *(nn.Conv2d(2, 8, 4, 2, 1), nn.SiLU(), nn.GroupNorm(2, 8), nn.Dropout2d(0.2)),
        *(nn.Conv2d(8, 8, 4, 2, 1), nn.SiLU(), nn.Flatten(), nn.Linear(128, 1)),
    )
    savers = [save_memory(maker), save_memory(judge)] if save else []
    makers = torch.optim.Adam(maker.parameters(), 2e-3)
    judges = torch.optim.Adam(judge.parameters(), 2e-3)
    seen: list[torch.Tensor] = []
    for _ in range(7):
        real, made = torch.randn(4, 2, 16, 16), maker(torch.randn(4, 8, 1, 1))
        judges.zero_grad()
        mixed = (real + made.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
        loss = judge(made.detach()).mean() - judge(real).mean() + slope.square().mean()
        loss.backward()
        judges.step()
        makers.zero_grad()
        (-judge(made).mean()).backward()
        makers.step()
        seen += [loss.detach(), *(p.detach().clone() for p in maker.parameters())]
    return [*seen, *judge.parameters(), *maker.buffers()], savers


def recorded(model: nn.Module, *shape: int) -> Any:
    saver = save_memory(model, dry_run=True)
    for _ in range(2):
        model(torch.randn(*shape)).square().mean().backward()
    (known,) = saver._passes.values()
    return known.record


@pytest.mark.parametrize("slower", [1, 3, 40])
def test_the_least_memory_does_not_depend_on_how_busy_the_machine_was(slower: int) -> None:
    torch.manual_seed(0)
    record = recorded(VolumeNet(), 2, 3, 4, 8, 8)
    noisy = replace(
        record,
        operators=tuple(
            replace(call, took_ns=call.took_ns * (1 + number * 7919 % 13 * slower))
            for number, call in enumerate(record.operators)
        ),
        repeat_ns=record.repeat_ns * slower,
    )
    quiet, busy = (make_plan(one, MemoryTarget()) for one in (record, noisy))
    assert (busy.uses, busy.repeated, busy.results) == (quiet.uses, quiet.repeated, quiet.results)
    assert busy.peak_bytes == quiet.peak_bytes < quiet.peak_bytes_before
    assert busy.extra_ns > quiet.extra_ns


def test_operators_of_one_kind_and_size_took_equally_long() -> None:
    record = recorded(
        nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(4))), 3, 8
    )
    times = {call.took_ns for call in record.operators if call.name == "aten.silu.default"}
    assert len(times) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_it_costs_to_follow_a_plan_is_measured(dtype: torch.dtype) -> None:
    """Whatever torch's defaults are, and without a random number of theirs."""
    following_costs.cache_clear()
    state, usual = torch.get_rng_state(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        watch_ns, repeat_ns = following_costs()
    finally:
        torch.set_default_dtype(usual)
    assert torch.equal(torch.get_rng_state(), state)
    assert 0 < watch_ns < 1_000_000
    assert repeat_ns > watch_ns
