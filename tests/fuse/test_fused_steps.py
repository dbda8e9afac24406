"""Steps by torch's own kernels, and settings that wait on the device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from twins import seeded, step, step_alone

from stepscope.fix.fuse import ModelArray, fuse

optim = torch.optim
SETTINGS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "sgd": (optim.SGD, [{"lr": 0.1}, {"lr": 0.02, "weight_decay": 0.1}]),
    "momentum": (optim.SGD, [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.02, "momentum": 0.5}]),
    "nesterov": (optim.SGD, [{"lr": rate, "momentum": 0.9, "nesterov": True} for rate in (1, 2)]),
    "dampening, which has no kernel": (
        optim.SGD,
        [{"lr": 0.1, "momentum": 0.9, "dampening": share} for share in (0.5, 0.0)],
    ),
    "adam": (optim.Adam, [{"lr": 0.1, "betas": (0.5, 0.9)}, {"lr": 0.02, "weight_decay": 0.1}]),
    "amsgrad": (optim.Adam, [{"lr": rate, "amsgrad": True} for rate in (0.1, 0.02)]),
    "adamw": (optim.AdamW, [{"lr": 0.1}, {"lr": 0.02, "weight_decay": 0.3}]),
    "maximize": (optim.AdamW, [{"lr": 0.1, "maximize": True}] * 2),
    "alike": (optim.Adam, [{"lr": 0.1}] * 2),
}


def nets() -> list[nn.Module]:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double(), 2)


def train(array: ModelArray, steps: int = 5) -> None:
    torch.manual_seed(7)
    for _ in range(steps):
        x = torch.randn(5, 6, dtype=torch.float64)
        step(array, array.apply_each(lambda x: array(x).square().mean(), x))


def train_alone(model: nn.Module, optimizer: optim.Optimizer, steps: int = 5) -> None:
    torch.manual_seed(7)
    for _ in range(steps):
        step_alone(optimizer, model(torch.randn(5, 6, dtype=torch.float64)).square().mean())


def adams(models: list[nn.Module]) -> list[optim.Optimizer]:
    return [optim.Adam(one.parameters(), lr=0.1 * (1 + n)) for n, one in enumerate(models)]


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "held on the device"])
@pytest.mark.parametrize("kernels", [False, True], ids=["lists", "kernels"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_way_to_step_ends_where_each_model_would_alone(
    name: str, kernels: bool, on_device: bool
) -> None:
    kind, settings = SETTINGS[name]
    models = nets()
    twins = copy.deepcopy(models)
    array = fuse(models, [kind(m.parameters(), **s) for m, s in zip(models, settings, strict=True)])
    assert array.optimizer is not None
    array.optimizer.use_kernels = kernels
    if on_device:
        array.optimizer.hold_on_device()
    train(array)
    precise = not (kernels and on_device)  # torch's kernels take a rate of the device in fp32
    limit = 1e-10 if precise else 1e-6
    for model, twin, own in zip(models, twins, settings, strict=True):
        train_alone(twin, kind(twin.parameters(), **own))
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit)


def test_settings_are_copied_only_when_one_changed() -> None:
    models = nets()
    own = adams(models)
    array = fuse(models, own)
    assert array.optimizer is not None
    columns = array.optimizer._columns
    train(array, 1)
    first = columns._columns
    assert first is not None
    version = first._version
    train(array, 2)
    assert columns._columns is first
    assert first._version == version
    own[1].param_groups[0]["lr"] = 0.5
    train(array, 1)
    assert columns._columns is first
    assert first._version == version + 1
    place = columns._places[0, "lr"]
    assert first[place].tolist() == [0.1, 0.5]


def test_what_a_captured_step_holds_changes_with_betas_but_not_with_the_rate() -> None:
    models = nets()
    own = adams(models)
    optimizer = fuse(models, own).optimizer
    assert optimizer is not None
    optimizer.use_kernels = True

    def held() -> Any:
        optimizer.prepare()
        return optimizer.held()

    first = held()
    own[0].param_groups[0]["lr"] = 7.0
    assert held() == first
    own[0].param_groups[0]["betas"] = (0.5, 0.9)
    assert held() != first
    optimizer.use_kernels = False
    first = held()
    own[0].param_groups[0]["betas"] = (0.6, 0.9)
    assert held() == first
    own[0].param_groups[0]["weight_decay"] = 0.1  # not used before
    assert held() != first
