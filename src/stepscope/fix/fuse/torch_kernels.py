"""Steps by torch's own fused kernels: one call for all models, or one for each model.

A kernel reads and writes every value once, where updates.py goes over memory a dozen times. It
takes one set of settings: models that differ get a call each, on their parts of the stacks.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.fix.fuse.updates import Tensors, WeightStep

    Settings = dict[str, Any]
    Kernel = Callable[["KernelCall"], None]

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
    _call_side_by_side(KERNELS[kind], calls)


def _call_side_by_side(kernel: Kernel, calls: list[KernelCall]) -> None:
    """One model's weights make fewer blocks than a GPU holds, of unequal length: on a few streams
    the next model fills what the last one leaves idle. The calls allocate nothing."""
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


def _sgd(call: KernelCall) -> None:
    names = ("weight_decay", "momentum", "dampening", "lr", "nesterov", "maximize")
    torch._fused_sgd_(
        call.weights,
        call.gradients,
        call.states.get("momentum_buffer", []),
        **{name: call.settings[name] for name in names},
        is_first_step=False,  # buffers start from zero, which without dampening is the same
    )


def _adam(call: KernelCall) -> None:
    _by_adam(torch._fused_adam_, call)


def _adamw(call: KernelCall) -> None:
    _by_adam(torch._fused_adamw_, call)


def _plain_or_decoupled(call: KernelCall) -> None:
    (_adamw if call.settings.get("decoupled_weight_decay") else _adam)(call)


def _by_adam(kernel: Any, call: KernelCall) -> None:
    names = ("lr", "beta1", "beta2", "weight_decay", "eps", "amsgrad", "maximize")
    kernel(
        call.weights,
        call.gradients,
        call.states["exp_avg"],
        call.states["exp_avg_sq"],
        call.states.get("max_exp_avg_sq", []),
        [call.count] * len(call.weights),
        **{name: call.settings[name] for name in names},
    )


KERNELS: dict[type, Kernel] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _plain_or_decoupled,
    torch.optim.AdamW: _adamw,
}
