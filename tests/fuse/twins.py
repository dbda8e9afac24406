"""Train models fused and each alone, from the same weights, data and random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from stepscope.fix.fuse import ModelArray, fuse

Optimizers = Callable[[Sequence[nn.Module]], list[torch.optim.Optimizer]]
COUNT, STEPS = 3, 4


@dataclass
class Trained:
    """Losses are [steps, models]."""

    array: ModelArray
    twins: list[nn.Module]
    fused: torch.Tensor
    alone: torch.Tensor
    largest: list[dict[str, torch.Tensor]]  # of each twin's gradients, by name


def adams(models: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adam(model.parameters(), lr=1e-2 / (1 + place), weight_decay=0.01 * place)
        for place, model in enumerate(models)
    ]


def square(output: Any) -> torch.Tensor:
    """A loss of any output: every tensor in it counts."""
    first = output[0] if isinstance(output, tuple) else output
    return functional.mse_loss(first, torch.ones_like(first) * 0.3)


def seeded(build: Callable[[], nn.Module], count: int = COUNT) -> list[nn.Module]:
    models = []
    for seed in range(count):
        torch.manual_seed(seed)
        models.append(build())
    return models


def step(array: ModelArray, losses: Any) -> torch.Tensor:
    """Step an array from every model's loss; return these."""
    array.zero_grad()
    array.backward(losses)
    array.step()
    result: torch.Tensor = losses.front().detach()
    return result


def step_alone(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train_both(
    build: Callable[[], nn.Module],
    inputs: Callable[[], tuple[Any, ...]],
    *,
    loss: Callable[[Any], torch.Tensor] = square,
    optimizers: Optimizers = adams,
    shared: bool = False,
    count: int = COUNT,
    steps: int = STEPS,
    schedulers: Callable[[torch.optim.Optimizer, int], Any] | None = None,
) -> Trained:
    """`shared`: one batch for all models, else one each."""
    torch.set_default_dtype(torch.float64)
    try:
        models = seeded(build, count)
        twins = copy.deepcopy(models)
        torch.manual_seed(99)
        batches = [[inputs() for _ in range(1 if shared else count)] for _ in range(steps)]
        own = optimizers(models)
        plans = [schedulers(one, place) for place, one in enumerate(own)] if schedulers else []
        array = fuse(models, own, plans, seeds=[500 + place for place in range(count)])
        fused = [_fused_step(array, batch, loss, shared) for batch in batches]
        others = optimizers(twins)
        largest = [
            {name: torch.zeros_like(one) for name, one in twin.named_parameters()} for twin in twins
        ]
        alone = [
            _train_alone(
                twin, others[place], place, batches, loss, shared, schedulers, largest[place]
            )
            for place, twin in enumerate(twins)
        ]
        return Trained(array, twins, torch.stack(fused), torch.stack(alone, 1), largest)
    finally:
        torch.set_default_dtype(torch.float32)


def _fused_step(array: ModelArray, batch: list[Any], loss: Any, shared: bool) -> torch.Tensor:
    given = batch[0] if shared else [list(values) for values in zip(*batch, strict=True)]
    losses = step(array, array.apply_each(lambda *values: loss(array(*values)), *given))
    array.step_schedulers()
    return losses


def _train_alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    place: int,
    batches: list[Any],
    loss: Any,
    shared: bool,
    schedulers: Any,
    largest: dict[str, torch.Tensor],
) -> torch.Tensor:
    torch.manual_seed(500 + place)
    plan = schedulers(optimizer, place) if schedulers else None
    losses = []
    for batch in batches:
        value = loss(model(*batch[0 if shared else place]))
        optimizer.zero_grad()
        value.backward()
        for name, one in model.named_parameters():
            if one.grad is not None:
                largest[name] = torch.maximum(largest[name], one.grad.abs())
        optimizer.step()
        if plan is not None:
            plan.step()
        losses.append(value.detach())
    return torch.stack(losses)


def assert_same(trained: Trained, tolerance: float = 1e-10) -> None:
    """Losses step for step, and every tensor of every model at the end, but for values whose
    gradient is zero up to rounding, which Adam makes as large as any: the bias of a key, or one
    before a norm. Their effect is in the losses."""
    torch.testing.assert_close(trained.fused, trained.alone, rtol=tolerance, atol=tolerance)
    for place, twin in enumerate(trained.twins):
        own = trained.array.state_of(place)
        drifts = any(bool((one <= 1e-12).any()) for one in trained.largest[place].values())
        for name, theirs in twin.state_dict().items():
            if drifts and name.endswith("running_mean"):  # follows a bias before its norm
                continue
            moves = trained.largest[place].get(name, torch.tensor(1.0)) > 1e-12
            ours, value = (torch.where(moves, one, 0) for one in (own[name], theirs))
            torch.testing.assert_close(ours, value, rtol=1e-7, atol=1e-9, msg=name)
