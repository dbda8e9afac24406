"""One step of each kind of optimizer, for all models at once.

`settings` are the optimizer's own, each one value or a column with every model's. The order of
operations is torch's, so that a model trains as it would alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepscope.fix.fuse.stacked import NotFusableError

if TYPE_CHECKING:
    from collections.abc import Callable

    State = dict[str, torch.Tensor]
    Update = Callable[["WeightStep"], None]

_UNKNOWN = ("differentiable",)


class WeightStep(NamedTuple):
    """What one step of one stacked weight needs."""

    weight: torch.Tensor
    gradient: torch.Tensor
    state: State  # by torch's names; filled by the first step
    settings: dict[str, Any]
    count: torch.Tensor  # a column: each model's steps, this one counted


def sgd(step: WeightStep) -> None:
    weight, gradient, state, settings, count = step
    gradient = _signed(gradient, settings)
    gradient = _decayed(gradient, weight, settings["weight_decay"])
    momentum = settings["momentum"]
    if _is_used(momentum):
        buffer = state.get("momentum_buffer")
        if buffer is None:
            buffer = state["momentum_buffer"] = torch.zeros_like(weight)
        damped = (1 - settings["dampening"]) * gradient
        new = torch.where(count <= 1, gradient, buffer * momentum + damped)
        buffer.copy_(new)
        gradient = gradient + buffer * momentum if settings["nesterov"] else buffer
    weight.sub_(gradient * settings["lr"])


def adam(step: WeightStep) -> None:
    weight, gradient, state, settings, count = step
    gradient = _signed(gradient, settings)
    if settings.get("decoupled_weight_decay"):
        weight.mul_(1 - settings["lr"] * settings["weight_decay"])
    else:
        gradient = _decayed(gradient, weight, settings["weight_decay"])
    mean, square = _pair(state, weight, "exp_avg", "exp_avg_sq")
    beta1, beta2 = settings["betas"]
    mean.add_((gradient - mean) * (1 - beta1))
    square.mul_(beta2).add_(gradient * gradient * (1 - beta2))
    first, second = (_correction(beta, count, weight) for beta in (beta1, beta2))
    if settings["amsgrad"]:
        (largest,) = _pair(state, weight, "max_exp_avg_sq")
        torch.maximum(largest, square, out=largest)
        square = largest
    root = square.sqrt() / second.sqrt() + settings["eps"]
    weight.sub_(settings["lr"] / first * mean / root)


def adamw(step: WeightStep) -> None:
    adam(step._replace(settings={**step.settings, "decoupled_weight_decay": True}))


def adadelta(step: WeightStep) -> None:
    weight, gradient, state, settings, _ = step
    gradient = _decayed(_signed(gradient, settings), weight, settings["weight_decay"])
    square, moved = _pair(state, weight, "square_avg", "acc_delta")
    rho, eps = settings["rho"], settings["eps"]
    square.mul_(rho).add_(gradient * gradient * (1 - rho))
    delta = (moved + eps).sqrt() / (square + eps).sqrt() * gradient
    moved.mul_(rho).add_(delta * delta * (1 - rho))
    weight.sub_(delta * settings["lr"])


def rmsprop(step: WeightStep) -> None:
    weight, gradient, state, settings, _ = step
    gradient = _decayed(_signed(gradient, settings), weight, settings["weight_decay"])
    (square,) = _pair(state, weight, "square_avg")
    alpha = settings["alpha"]
    square.mul_(alpha).add_(gradient * gradient * (1 - alpha))
    root = square
    if settings["centered"]:
        (mean,) = _pair(state, weight, "grad_avg")
        mean.add_((gradient - mean) * (1 - alpha))
        root = square - mean * mean
    move = gradient / (root.sqrt() + settings["eps"])
    if _is_used(settings["momentum"]):
        (buffer,) = _pair(state, weight, "momentum_buffer")
        buffer.mul_(settings["momentum"]).add_(move)
        move = buffer
    weight.sub_(move * settings["lr"])


def adagrad(step: WeightStep) -> None:
    weight, gradient, state, settings, count = step
    gradient = _decayed(_signed(gradient, settings), weight, settings["weight_decay"])
    total = state.get("sum")
    if total is None:
        initial = settings["initial_accumulator_value"]
        total = state["sum"] = torch.zeros_like(weight) + initial
    total.add_(gradient * gradient)
    rate = settings["lr"] / (1 + (count - 1) * settings["lr_decay"])
    weight.sub_((rate * gradient / (total.sqrt() + settings["eps"])).to(weight.dtype))


def _signed(gradient: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    if any(settings.get(name) for name in _UNKNOWN):
        raise NotFusableError("differentiable optimizers are not fused")
    return -gradient if settings.get("maximize") else gradient


def _decayed(gradient: torch.Tensor, weight: torch.Tensor, decay: Any) -> torch.Tensor:
    return gradient + weight * decay if _is_used(decay) else gradient


def _is_used(setting: Any) -> bool:
    return bool(setting.any()) if isinstance(setting, torch.Tensor) else bool(setting)


def _pair(state: State, weight: torch.Tensor, *names: str) -> tuple[torch.Tensor, ...]:
    """Values that start from zero."""
    return tuple(state.setdefault(name, torch.zeros_like(weight)) for name in names)


def _correction(beta: Any, count: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    exact = beta.double() if isinstance(beta, torch.Tensor) else beta
    corrected: torch.Tensor = 1 - exact**count
    return corrected.to(torch.promote_types(weight.dtype, torch.float32))


UPDATES: dict[type, Update] = {
    torch.optim.SGD: sgd,
    torch.optim.Adam: adam,
    torch.optim.AdamW: adamw,
    torch.optim.Adadelta: adadelta,
    torch.optim.RMSprop: rmsprop,
    torch.optim.Adagrad: adagrad,
}
