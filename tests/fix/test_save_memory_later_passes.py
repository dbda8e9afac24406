"""Whatever changes between the recorded pass and later ones must be noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_nets import same_bits
from saved_trainings import deterministic as deterministic
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stepscope.fix import save_memory
from stepscope.fix.saved import MemorySaver

pytestmark = pytest.mark.usefixtures("deterministic")
Change = Callable[[Any], None]
PASSES = 10


class Settings(nn.Module):
    """What forward does depends on attributes that no saved tensor shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.inner = nn.LayerNorm(16), Shifted()
        self.shift, self.factor, self.kind = 0.5, 2.0, "tanh"
        self.mask = torch.ones(8, 16)
        self.swap, self.twice = False, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        one = functional.gelu(y * self.factor)
        two = torch.tanh(y) if self.kind == "tanh" else torch.sigmoid(y)
        y = self.norm(two - one if self.swap else one - two)
        y = self.inner(functional.silu(y + self.shift))
        y = torch.exp(-(y + self.mask).square())
        if self.twice:
            y = functional.softplus(y)
        return torch.tanh(self.second(y))


class Shifted(nn.Module):
    shift = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.shift + torch.sigmoid(x)) * torch.relu(x)


def run(change: Change | None, at: int, *, save: bool) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    model = Settings()
    saver = save_memory(model) if save else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for number in range(PASSES):
        if number == at and change is not None:
            change(model)
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return seen, saver


def set_to(**values: Any) -> Change:
    def change(model: Any) -> None:
        for name, value in values.items():
            owner, _, attribute = name.rpartition("__")
            setattr(model.get_submodule(owner), attribute, value)

    return change


CHANGES = {
    "nothing": None,
    "a number that is added": set_to(shift=0.25),
    "a factor": set_to(factor=3.0),
    "another activation": set_to(kind="sigmoid"),
    "a mask": set_to(mask=torch.full((8, 16), 0.5)),
    "operands in another order": set_to(swap=True),
    "one operator more": set_to(twice=True),
    "the norm's epsilon": set_to(norm__eps=0.1),
    "a number inside a module": set_to(inner__shift=-1.0),
    "another parameter": lambda model: setattr(
        model.norm, "weight", nn.Parameter(torch.full((16,), 2.0))
    ),
    "a layer swapped": lambda model: setattr(model, "first", nn.Linear(16, 16)),
    "a norm without parameters": lambda model: setattr(
        model, "norm", nn.LayerNorm(16, elementwise_affine=False)
    ),
    "frozen": lambda model: model.first.requires_grad_(False),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("at", [4, 7])
def test_what_changes_between_passes_is_noticed(name: str, at: int) -> None:
    plain, _ = run(CHANGES[name], at, save=False)
    saved, saver = run(CHANGES[name], at, save=True)
    assert same_bits(plain, saved)
    assert saver.plan.saved_bytes < saver.plan.saved_bytes_before


def check_same(make: Callable[[], nn.Module], x: torch.Tensor) -> MemorySaver:
    results = []
    for save in (False, True):
        torch.manual_seed(0)
        model = make()
        saver = save_memory(model) if save else None
        for number in range(7):
            model(x + number / 10).square().mean().backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    assert same_bits(*results)
    assert saver is not None
    return saver


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2))
        self.inside = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(16))
        self.after = nn.Sequential(nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 16))
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self._nested, self.before(x), use_reentrant=self._reentrant)
        return self.after(y)

    def _nested(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.inside, x, use_reentrant=self._reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_the_model_are_left_alone(reentrant: bool) -> None:
    saver = check_same(lambda: Checkpointed(reentrant), torch.randn(8, 16))
    assert saver.notes == []
    assert saver.plan is not None
    assert saver.held_bytes == saver.plan.saved_bytes < saver.plan.saved_bytes_before
