"""Adam and AdamW for stacks of weights whose models have settings of their own: one launch a stack.

torch's fused kernels take one set of settings a call, so models that differ need a call each, and
one model's weights do not fill a GPU. Here every program steps a piece of one model's weights with
that model's settings, which it reads from the device: each value is read and written once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from stepscope.fix.fuse import updates
from stepscope.fix.fuse.updates import WeightStep

_BLOCK = 2048  # weights that one program steps


@triton.jit
def _step(
    weight, gradient, mean, square, settings, size,
    DECAYS: tl.constexpr, DECOUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(1)
    own = settings + model * 7
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    at += model.to(tl.int64) * size
    w = tl.load(weight + at, mask=here)
    g = tl.load(gradient + at, mask=here)
    m = tl.load(mean + at, mask=here)
    v = tl.load(square + at, mask=here)
    if DECAYS and DECOUPLED:
        w = w * tl.load(own)
    if DECAYS and not DECOUPLED:
        g = g + w * tl.load(own)
    m = m + (g - m) * tl.load(own + 1)
    v = v * tl.load(own + 2) + g * g * tl.load(own + 3)
    root = tl.sqrt_rn(v) * tl.load(own + 4) + tl.load(own + 5)
    w = w - tl.load(own + 6) * tl.div_rn(m, root)
    tl.store(mean + at, m, mask=here)
    tl.store(square + at, v, mask=here)
    tl.store(weight + at, w, mask=here)


def can_step(kind: type, step: WeightStep) -> bool:
    """Plain Adam of float32 weights; torch steps the rest."""
    if kind not in (torch.optim.Adam, torch.optim.AdamW) or step.settings["amsgrad"]:
        return False
    return "maximize" not in step.used and step.weights[0].dtype == torch.float32


def step_all(kind: type, step: WeightStep) -> None:
    """Every model's step, with a launch for each stack."""
    decoupled = kind is torch.optim.AdamW or bool(step.settings.get("decoupled_weight_decay"))
    settings = _settings(step, decoupled)
    means, squares = step.state("exp_avg"), step.state("exp_avg_sq")
    for stacks in zip(step.weights, step.gradients, means, squares, strict=True):
        models, size = len(stacks[0]), stacks[0][0].numel()
        grid = (triton.cdiv(size, _BLOCK), models)
        switches = {"DECAYS": "weight_decay" in step.used, "DECOUPLED": decoupled}
        with torch.cuda.device_of(stacks[0]):
            _step[grid](*stacks, settings, size, **switches, BLOCK=_BLOCK)


def _settings(step: WeightStep, decoupled: bool) -> torch.Tensor:
    """[models, 7]: the factors of one step, in the order in which the kernel uses them."""
    names = ("lr", "beta1", "beta2", "eps", "weight_decay")
    rate, beta1, beta2, eps, decay = (step.column(step.settings[name]) for name in names)
    factors = (
        1 - rate * decay if decoupled else decay,
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**step.count).rsqrt(),
        eps,
        rate / (1 - beta1**step.count),
    )
    return torch.stack(factors, 1).float()


def agrees(device: torch.device) -> bool:
    """Three steps of two models that differ end where torch's own operations end."""
    for kind, update in ((torch.optim.Adam, updates.adam), (torch.optim.AdamW, updates.adamw)):
        ours, theirs = _example(device), _example(device)
        for _ in range(3):
            step_all(kind, ours)
            update(theirs)
            ours.count.add_(1)
            theirs.count.add_(1)
        for made, wanted in zip(ours.weights, theirs.weights, strict=True):
            if not torch.allclose(made, wanted, rtol=1e-5, atol=1e-7):
                return False
    return True


def _example(device: torch.device) -> WeightStep:
    draw = torch.Generator(device).manual_seed(0)
    columns = {
        "lr": [1e-3, 3e-2], "beta1": [0.9, 0.8], "beta2": [0.999, 0.99], "eps": [1e-8, 1e-6],
        "weight_decay": [0.0, 0.1],
    }  # fmt: skip
    settings: dict[str, Any] = {
        name: torch.tensor(values, dtype=torch.float64, device=device)
        for name, values in columns.items()
    }
    sizes = ((2, 3, 7), (2, 2 * _BLOCK + 5))
    weights, gradients = (
        [torch.randn(size, device=device, generator=draw) for size in sizes] for _ in range(2)
    )
    count = torch.tensor([1.0, 5.0], dtype=torch.float64, device=device)
    states: list[updates.State] = [{}, {}]
    return updates.WeightStep(
        weights, gradients, states, {**settings, "amsgrad": False}, set(columns), count
    )
