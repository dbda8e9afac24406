"""The Triton kernels of an array give what torch gives: on a GPU, or in the interpreter."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import nn
from twins import step, step_alone

from stepscope.fix.fuse import fuse
from stepscope.fix.fuse.rules.convolution_products import channels_last

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(),
        reason="no CUDA device, and TRITON_INTERPRET=1 is not set",
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter computes with numpy
]


@pytest.mark.parametrize("module", ["filter_kernel", "adam_kernel"])
def test_kernels_agree_with_torch(module: str) -> None:
    kernels = importlib.import_module(f"stepscope.fix.fuse.{module}")
    assert kernels.agrees(DEVICE)


@pytest.mark.parametrize(
    "shape", [(2, 3, 5, 3, 3), (1, 2, 300, 3, 3), (2, 4, 3, 7, 7), (2, 2, 9, 4), (2, 2, 6, 2, 3, 2)]
)
def test_filters_are_laid_out_and_their_gradients_come_back(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, device=DEVICE, requires_grad=True)
    made = channels_last(weight, torch.float16)
    assert made.is_contiguous()
    assert torch.equal(made, weight.movedim(2, -1).half())
    upstream = torch.randn_like(made)
    (gradient,) = torch.autograd.grad(made, weight, upstream)
    assert gradient.is_contiguous()
    assert torch.equal(gradient, upstream.float().movedim(-1, 2))


OWN: list[dict[str, Any]] = [
    {"lr": 1e-3, "weight_decay": 0.1},
    {"lr": 2e-2, "betas": (0.8, 0.95), "eps": 1e-4},
    {"lr": 5e-3},
]


@pytest.mark.parametrize("decays", [True, False], ids=["decay", "no decay"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_models_that_differ_step_as_they_would_alone(kind: Any, decays: bool) -> None:
    torch.manual_seed(0)
    settings = [{**one, "weight_decay": one.get("weight_decay", 0.0) * decays} for one in OWN]
    models = [nn.Linear(70, 40).to(DEVICE) for _ in OWN]
    alone = [nn.Linear(70, 40).to(DEVICE) for _ in OWN]
    for one, other in zip(models, alone, strict=True):
        other.load_state_dict(one.state_dict())
    own = [kind(one.parameters(), **more) for one, more in zip(models, settings, strict=True)]
    theirs = [kind(one.parameters(), **more) for one, more in zip(alone, settings, strict=True)]
    array = fuse(models, own)
    assert array.optimizer is not None
    array.optimizer.use_kernels = True
    x = torch.randn(6, 70, device=DEVICE)
    for _ in range(4):
        step(array, array(x).square().mean())
        for model, optimizer in zip(alone, theirs, strict=True):
            step_alone(optimizer, model(x).square().mean())
    for number, model in enumerate(alone):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(array.state_of(number)[name], value, rtol=2e-4, atol=2e-6)
