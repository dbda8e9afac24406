"""One step of each kind of optimizer for all weights of all models: written out, and by
torch's fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    State = dict[str, torch.Tensor]
    Tensors = list[torch.Tensor]
    Settings = dict[str, Any]

# Lists of weights go to torch's multi-tensor functions. A setting is a number, or a column with
# every model's, which is spread over the weights. The order of operations is torch's, so that a
# model trains as it would alone.


class WeightStep(NamedTuple):
    """One step of a group of stacked weights."""

    weights: Tensors
    gradients: Tensors
    states: list[State]  # by torch's names; filled by the first step
    settings: dict[str, Any]  # a number or a column [models] each
    used: set[str]  # settings that are not zero for every model
    count: torch.Tensor  # [models]: each model's steps, this one counted

    def spread(self, setting: Any) -> Any:
        """A number, or for each weight a column that is as wide as it."""
        if not isinstance(setting, torch.Tensor):
            return setting
        cast: dict[torch.dtype, torch.Tensor] = {}
        columns = []
        for weight in self.weights:
            kind = torch.promote_types(weight.dtype, torch.float32)
            if kind not in cast:
                cast[kind] = setting.to(kind)
            columns.append(cast[kind].reshape(-1, *(1,) * (weight.dim() - 1)))
        return columns

    def column(self, setting: Any) -> torch.Tensor:
        """Every model's value, also of a setting in which all agree."""
        if isinstance(setting, torch.Tensor):
            return setting
        return torch.full_like(self.count, setting)

    def state(self, name: str, start: torch.Tensor | None = None) -> Tensors:
        """Return the optimizer's state of each weight: zero at first, or each model's `start`."""
        for state, weight in zip(self.states, self.weights, strict=True):
            if name not in state:
                state[name] = torch.zeros_like(weight)
                if start is not None:
                    state[name].add_(self._replace(weights=[weight]).spread(start)[0])
        return [state[name] for state in self.states]

    def descent(self) -> Tensors:
        """The gradients, turned for optimizers that maximize."""
        if "maximize" in self.used:
            return list(torch._foreach_neg(self.gradients))
        return self.gradients

    def decayed(self, gradients: Tensors) -> Tensors:
        if "weight_decay" not in self.used:
            return gradients
        return self.add(gradients, self.weights, self.settings["weight_decay"])

    def add(self, left: Tensors, right: Tensors, factor: Any) -> Tensors:
        """left + right * factor."""
        if isinstance(factor, torch.Tensor):
            return list(torch._foreach_add(left, torch._foreach_mul(right, self.spread(factor))))
        return list(torch._foreach_add(left, right, alpha=factor))

    def add_(self, left: Tensors, right: Tensors, factor: Any) -> None:
        """left += right * factor."""
        if isinstance(factor, torch.Tensor):
            torch._foreach_add_(left, torch._foreach_mul(right, self.spread(factor)))
        else:
            torch._foreach_add_(left, right, alpha=factor)

    def add_squares_(self, squares: Tensors, values: Tensors, keep: Any) -> None:
        """squares = squares * keep + values² * (1 - keep)."""
        torch._foreach_mul_(squares, self.spread(keep))
        if isinstance(keep, torch.Tensor):
            self.add_(squares, list(torch._foreach_mul(values, values)), 1 - keep)
        else:
            torch._foreach_addcmul_(squares, values, values, 1 - keep)

    def average_(self, means: Tensors, values: Tensors, share: Any) -> None:
        """means += (values - means) * share."""
        if isinstance(share, torch.Tensor):
            self.add_(means, list(torch._foreach_sub(values, means)), share)
        else:
            torch._foreach_lerp_(means, values, share)


def sgd(step: WeightStep) -> None:
    settings = step.settings
    move = step.decayed(step.descent())
    if "momentum" in step.used:
        momentum = settings["momentum"]
        buffers = step.state("momentum_buffer")
        torch._foreach_mul_(buffers, step.spread(momentum))
        step.add_(buffers, move, _undamped(step))
        move = step.add(move, buffers, momentum) if settings["nesterov"] else buffers
    step.add_(step.weights, move, -settings["lr"])


def _undamped(step: WeightStep) -> Any:
    """The gradient's share in the momentum: all of it in a model's first step."""
    if "dampening" not in step.used:
        return 1.0
    share = 1 - step.column(step.settings["dampening"])
    plain = (step.count <= 1) | (step.column(step.settings["momentum"]) == 0)
    return torch.where(plain, torch.ones_like(share), share)


def adam(step: WeightStep, decoupled: bool = False) -> None:
    settings, gradients = step.settings, step.descent()
    lr, beta1, beta2 = (settings[name] for name in ("lr", "beta1", "beta2"))
    if not (decoupled or settings.get("decoupled_weight_decay")):
        gradients = step.decayed(gradients)
    elif "weight_decay" in step.used:
        torch._foreach_mul_(step.weights, step.spread(1 - lr * settings["weight_decay"]))
    means, squares = step.state("exp_avg"), step.state("exp_avg_sq")
    step.average_(means, gradients, 1 - beta1)
    step.add_squares_(squares, gradients, beta2)
    if settings["amsgrad"]:
        largest = step.state("max_exp_avg_sq")
        torch._foreach_maximum_(largest, squares)
        squares = largest
    roots = list(torch._foreach_sqrt(squares))
    torch._foreach_div_(roots, step.spread((1 - beta2**step.count).sqrt()))
    torch._foreach_add_(roots, step.spread(settings["eps"]))
    moves = list(torch._foreach_div(means, roots))
    step.add_(step.weights, moves, -lr / (1 - beta1**step.count))


adamw = partial(adam, decoupled=True)


def adadelta(step: WeightStep) -> None:
    gradients, settings = step.decayed(step.descent()), step.settings
    squares, moved = step.state("square_avg"), step.state("acc_delta")
    eps = step.spread(settings["eps"])
    step.add_squares_(squares, gradients, settings["rho"])
    deltas = list(torch._foreach_sqrt(torch._foreach_add(moved, eps)))
    torch._foreach_div_(deltas, torch._foreach_sqrt(torch._foreach_add(squares, eps)))
    torch._foreach_mul_(deltas, gradients)
    step.add_squares_(moved, deltas, settings["rho"])
    step.add_(step.weights, deltas, -settings["lr"])


def rmsprop(step: WeightStep) -> None:
    gradients, settings = step.decayed(step.descent()), step.settings
    squares = step.state("square_avg")
    alpha = settings["alpha"]
    step.add_squares_(squares, gradients, alpha)
    spreads = squares
    if settings["centered"]:
        means = step.state("grad_avg")
        step.average_(means, gradients, 1 - alpha)
        spreads = list(torch._foreach_addcmul(squares, means, means, -1.0))
    roots = list(torch._foreach_sqrt(spreads))
    torch._foreach_add_(roots, step.spread(settings["eps"]))
    moves = list(torch._foreach_div(gradients, roots))
    if "momentum" in step.used:
        buffers = step.state("momentum_buffer")
        torch._foreach_mul_(buffers, step.spread(settings["momentum"]))
        torch._foreach_add_(buffers, moves)
        moves = buffers
    step.add_(step.weights, moves, -settings["lr"])


def adagrad(step: WeightStep) -> None:
    gradients, settings = step.decayed(step.descent()), step.settings
    totals = step.state("sum", step.column(settings["initial_accumulator_value"]))
    torch._foreach_addcmul_(totals, gradients, gradients, 1.0)
    roots = list(torch._foreach_sqrt(totals))
    torch._foreach_add_(roots, step.spread(settings["eps"]))
    moves = list(torch._foreach_div(gradients, roots))
    rate = settings["lr"]
    if "lr_decay" in step.used:
        rate = rate / (1 + (step.count - 1) * settings["lr_decay"])
    step.add_(step.weights, moves, -rate)


UPDATES: dict[type, Update] = {
    torch.optim.SGD: sgd,
    torch.optim.Adam: adam,
    torch.optim.AdamW: adamw,
    torch.optim.Adadelta: adadelta,
    torch.optim.RMSprop: rmsprop,
    torch.optim.Adagrad: adagrad,
}


# Steps by torch's own fused kernels: one call for all models, or one for each model.
#
# A kernel reads and writes every value once, where updates.py goes over memory a dozen times. It
# takes one set of settings: models that differ get a call each, on their parts of the stacks.

_SIDE_STREAMS = 4


class KernelCall(NamedTuple):
    """One call: the weights of all models, or one model's parts of them."""

    weights: Tensors
    gradients: Tensors
    states: dict[str, Tensors]
    settings: Settings  # numbers; the rate may be a tensor of the device
    count: torch.Tensor  # float32, no dimensions


def can_step(kind: type, step: WeightStep) -> bool:
    """Whether torch has a kernel for these weights."""
    if kind not in KERNELS or "differentiable" in step.used:
        return False
    if kind is torch.optim.SGD and "dampening" in step.used:
        return False  # its first step would differ from model to model
    first = step.weights[0]
    return all(
        weight.dtype == first.dtype
        and weight.device == first.device
        and gradient.dtype == first.dtype
        and gradient.stride() == weight.stride()
        and weight.is_contiguous()
        for weight, gradient in zip(step.weights, step.gradients, strict=True)
    )


def step_together(kind: type, step: WeightStep, settings: Settings) -> None:
    """All models have the same settings and as many steps behind them."""
    states = {name: step.state(name) for name in _states(kind, step)}
    count = step.count[0].float()
    KERNELS[kind](KernelCall(step.weights, step.gradients, states, settings, count))


def step_each(kind: type, step: WeightStep, settings: list[Settings]) -> None:
    """One call for each model."""
    weights, gradients = _by_model(step.weights), _by_model(step.gradients)
    states = {name: _by_model(step.state(name)) for name in _states(kind, step)}
    counts = step.count.float().unbind(0)
    calls = []
    for model, own in enumerate(settings):
        parts = {name: by_model[model] for name, by_model in states.items()}
        calls.append(KernelCall(weights[model], gradients[model], parts, own, counts[model]))
    # One model's weights make fewer blocks than a GPU holds, of unequal length: on a few streams
    # the next model fills what the last one leaves idle. The calls allocate nothing.
    kernel = KERNELS[kind]
    device = calls[0].weights[0].device
    if device.type != "cuda":
        for call in calls:
            kernel(call)
        return
    current = torch.cuda.current_stream(device)
    streams = _side_streams(device)
    for stream in streams:
        stream.wait_stream(current)
    for number, call in enumerate(calls):
        with torch.cuda.stream(streams[number % len(streams)]):
            kernel(call)
    for stream in streams:
        current.wait_stream(stream)


@cache
def _side_streams(device: torch.device) -> list[Any]:
    return [torch.cuda.Stream(device) for _ in range(_SIDE_STREAMS)]


def _by_model(stacks: Tensors) -> list[Tensors]:
    return [list(parts) for parts in zip(*(stack.unbind(0) for stack in stacks), strict=True)]


def _states(kind: type, step: WeightStep) -> list[str]:
    if kind is torch.optim.SGD:
        return ["momentum_buffer"] if "momentum" in step.used else []
    largest = ["max_exp_avg_sq"] if step.settings["amsgrad"] else []
    return ["exp_avg", "exp_avg_sq", *largest]


def _sgd_by_kernel(call: KernelCall) -> None:
    names = ("weight_decay", "momentum", "dampening", "lr", "nesterov", "maximize")
    torch._fused_sgd_(
        call.weights,
        call.gradients,
        call.states.get("momentum_buffer", []),
        **{name: call.settings[name] for name in names},
        is_first_step=False,  # buffers start from zero, which without dampening is the same
    )


def _adam_by_kernel(call: KernelCall, decoupled: bool = False) -> None:
    names = ("lr", "beta1", "beta2", "weight_decay", "eps", "amsgrad", "maximize")
    decoupled = decoupled or bool(call.settings.get("decoupled_weight_decay"))
    (torch._fused_adamw_ if decoupled else torch._fused_adam_)(
        call.weights,
        call.gradients,
        call.states["exp_avg"],
        call.states["exp_avg_sq"],
        call.states.get("max_exp_avg_sq", []),
        [call.count] * len(call.weights),
        **{name: call.settings[name] for name in names},
    )


KERNELS: dict[type, Kernel] = {
    torch.optim.SGD: _sgd_by_kernel,
    torch.optim.Adam: _adam_by_kernel,
    torch.optim.AdamW: partial(_adam_by_kernel, decoupled=True),
}


if TYPE_CHECKING:
    Update = Callable[["WeightStep"], None]
    Kernel = Callable[["KernelCall"], None]
