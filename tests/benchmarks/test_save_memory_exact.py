"""Library models with and without a plan: what counts as the same, and what as no answer."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import save_memory_exact

CELL = {"model": "small", "precision": "fp32"}


class SmallNet(nn.Module):
    """`noisy`: steps differ from run to run."""

    def __init__(self, *, noisy: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(4))
        )
        self._noise = torch.seed() if noisy else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._noise is not None:
            x = x + float(self._noise % 1009)
        return self.layers(x)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("library_models.small")
    module.build = lambda _tiny: SmallNet()
    module.make_batches = lambda _size, device, _tiny: [torch.randn(16, 8, device=device)]
    module.loss_of = lambda model, batch: model(batch).square().mean()
    monkeypatch.setitem(sys.modules, "library_models.small", module)
    return module


def test_a_model_that_trains_the_same(training: Any) -> None:
    del training
    row = save_memory_exact.compared(CELL, "cpu", tiny=True)
    assert (row["control"], row["least"], row["heavy"]) == ("same", "same", "same")
    assert row["least saved"] > 1
    assert "least: 1 of 1 the same to the last bit" in save_memory_exact.summary([CELL | row])


def test_a_model_that_does_not_repeat_tells_nothing(training: Any) -> None:
    training.build = lambda _tiny: SmallNet(noisy=True)
    row = save_memory_exact.compared(CELL, "cpu", tiny=True)
    assert row["control"] == save_memory_exact.NOT_REPEATED
    assert "1 rows, 0 of them repeat without a plan" in save_memory_exact.summary([CELL | row])


def test_a_plan_that_changes_a_step_is_seen(training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    del training

    def changing(model: Any, **_options: Any) -> Any:
        model.register_forward_hook(lambda _module, _args, output: output * 1.0000001)
        return type("Saver", (), {"plan": None, "notes": []})()

    monkeypatch.setattr(save_memory_exact, "save_memory", changing)
    row = save_memory_exact.compared(CELL, "cpu", tiny=True)
    assert (row["control"], row["least"]) == ("same", "differs")
