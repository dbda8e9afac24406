"""Optimizers, schedulers and clipping with settings of each model's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from twins import assert_same, train_both

from stepscope.errors import UsageError
from stepscope.fix.fuse import fuse

optim = torch.optim


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def rows() -> tuple[torch.Tensor]:
    return (torch.randn(5, 6),)


def each(kind: Any, *settings: dict[str, Any]) -> Callable[[Sequence[nn.Module]], list[Any]]:
    return lambda models: [
        kind(model.parameters(), **own) for model, own in zip(models, settings, strict=True)
    ]


KINDS = {
    "sgd": each(optim.SGD, {"lr": 0.1}, {"lr": 0.01}, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": each(
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.5, "dampening": 0.2},
        {"lr": 0.01, "momentum": 0.0},
    ),
    "nesterov": each(
        optim.SGD, *({"lr": rate, "momentum": 0.9, "nesterov": True} for rate in (0.1, 0.01, 0.2))
    ),
    "adam": each(
        optim.Adam,
        {"lr": 1e-2, "betas": (0.9, 0.99)},
        {"lr": 1e-3, "eps": 1e-3},
        {"lr": 1e-2, "betas": (0.5, 0.9), "weight_decay": 0.1},
    ),
    "amsgrad": each(optim.Adam, *({"lr": rate, "amsgrad": True} for rate in (0.1, 0.01, 0.2))),
    "adamw": each(optim.AdamW, {"lr": 1e-2}, {"lr": 1e-3, "weight_decay": 0.3}, {"lr": 1e-1}),
    "adadelta": each(optim.Adadelta, {"lr": 1.0}, {"rho": 0.5}, {"lr": 0.5, "eps": 1e-3}),
    "rmsprop": each(optim.RMSprop, {"lr": 1e-2}, {"alpha": 0.5}, {"lr": 1e-3, "eps": 1e-3}),
    "rmsprop-centered": each(
        optim.RMSprop,
        *({"lr": rate, "centered": True, "momentum": 0.9} for rate in (0.1, 0.01, 0.02)),
    ),
    "adagrad": each(optim.Adagrad, {"lr": 1e-2}, {"lr_decay": 0.1}, {"weight_decay": 0.1}),
    "maximize": each(optim.SGD, *({"lr": rate, "maximize": True} for rate in (0.1, 0.01, 0.2))),
    "nadam, which is not fused": each(optim.NAdam, {"lr": 1e-2}, {"lr": 1e-3}, {"lr": 2e-2}),
}


@pytest.mark.parametrize("name", KINDS)
def test_optimizer(name: str) -> None:
    trained = train_both(net, rows, optimizers=KINDS[name], steps=6)
    assert_same(trained)
    assert trained.array.optimizer is not None
    assert trained.array.optimizer.is_fused == (not name.startswith("nadam"))


SCHEDULERS: dict[str, Callable[[Any, int], Any]] = {
    "step": lambda one, place: lr_scheduler.StepLR(one, 1 + place, 0.5),
    "multistep": lambda one, place: lr_scheduler.MultiStepLR(one, [1 + place, 4], 0.1),
    "exponential": lambda one, place: lr_scheduler.ExponentialLR(one, 0.9 - 0.1 * place),
    "cosine": lambda one, place: lr_scheduler.CosineAnnealingLR(one, 3 + place),
    "linear": lambda one, place: lr_scheduler.LinearLR(one, 0.5, total_iters=2 + place),
    "lambda": lambda one, place: lr_scheduler.LambdaLR(one, lambda step: 0.9**step + place),
    "one-cycle": lambda one, place: lr_scheduler.OneCycleLR(one, 0.1 * (1 + place), 10),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler(name: str) -> None:
    adams = each(optim.Adam, {"lr": 1e-2}, {"lr": 1e-3}, {"lr": 3e-2})
    trained = train_both(net, rows, optimizers=adams, steps=6, schedulers=SCHEDULERS[name])
    assert_same(trained)


def test_a_plateau_lowers_the_rate_of_its_own_model() -> None:
    models = [net() for _ in range(2)]
    own = [optim.SGD(model.parameters(), lr=1.0) for model in models]
    plans = [lr_scheduler.ReduceLROnPlateau(one, factor=0.1, patience=0) for one in own]
    array = fuse(models, own, plans)
    for value in (1.0, 0.9, 0.8):
        array.step_schedulers([value, 1.0])
    assert own[0].param_groups[0]["lr"] == 1.0
    assert own[1].param_groups[0]["lr"] == pytest.approx(0.01)


def test_groups_of_parameters_keep_their_own_settings() -> None:
    def optimizers(models: Sequence[nn.Module]) -> list[Any]:
        made = []
        for place, model in enumerate(models):
            weights = [one for one in model.parameters() if one.dim() > 1]
            biases = [one for one in model.parameters() if one.dim() == 1]
            groups = [
                {"params": weights, "weight_decay": 0.1 * place},
                {"params": biases, "lr": 0.3},
            ]
            made.append(optim.AdamW(groups, lr=0.01))
        return made

    assert_same(train_both(net, rows, optimizers=optimizers))


def test_gradients_are_clipped_model_by_model() -> None:
    models = [net() for _ in range(3)]
    array = fuse(models, [optim.SGD(model.parameters(), lr=0.1) for model in models])
    losses = array.apply_each(lambda x: array(x).pow(2).sum(), rows()[0])
    array.backward(losses)
    twins = [[stack.grad[place].clone() for stack in array.parameters()] for place in range(3)]  # type: ignore[index]
    norms = array.clip_grad_norm_([0.1, 1e9, 0.5])
    for place, most in enumerate((0.1, 1e9, 0.5)):
        plain = [nn.Parameter(torch.zeros_like(one)) for one in twins[place]]
        for one, gradient in zip(plain, twins[place], strict=True):
            one.grad = gradient
        norm = nn.utils.clip_grad_norm_(plain, most)
        torch.testing.assert_close(norms[place], norm)
        for one, stack in zip(plain, array.parameters(), strict=True):
            assert stack.grad is not None
            torch.testing.assert_close(stack.grad[place], one.grad)


def test_a_model_that_skips_a_step_stays_as_it_is_and_the_others_go_on() -> None:
    models = [net() for _ in range(3)]
    array = fuse(models, [optim.Adam(model.parameters(), lr=0.1) for model in models])
    for skipped in ([False] * 3, [False, True, False], [False] * 3):
        before = [array.state_of(place) for place in range(3)]
        losses = array.apply_each(lambda x: array(x).pow(2).mean(), rows()[0])
        array.zero_grad()
        array.backward(losses)
        assert array.optimizer is not None
        array.optimizer.step(skipped)
        for place in range(3):
            same = all(
                torch.equal(value, before[place][name])
                for name, value in array.state_of(place).items()
            )
            assert same == skipped[place]


def test_optimizers_of_two_kinds_are_refused() -> None:
    models = [net(), net()]
    own = [optim.SGD(models[0].parameters(), lr=1.0), optim.Adam(models[1].parameters())]
    with pytest.raises(UsageError, match="one kind of optimizer"):
        fuse(models, own)


def test_an_optimizer_of_another_model_is_refused() -> None:
    models, stranger = [net(), net()], net()
    own = [optim.SGD(one.parameters(), lr=1.0) for one in (models[0], stranger)]
    with pytest.raises(UsageError, match="not model 1's"):
        fuse(models, own)
