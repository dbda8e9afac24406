"""Transposed convolutions of a compiled array, as a GPU computes them in bf16: channels last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stepscope.fix.fuse import ModelArray, fuse
from stepscope.fix.fuse.rules import convolutions
from stepscope.fix.fuse.rules.convolutions import transposed_gradients


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(5, 4, 4, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 3, (4, 3), 2, 1, output_padding=(0, 1)),
    )


def array_of_three() -> ModelArray:
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(generator())
    return fuse(
        models, [torch.optim.SGD(one.parameters(), 0.1) for one in models], draws="together"
    )


@pytest.fixture
def channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "_is_half_on_cuda", lambda _: True)


def trained(array: ModelArray, compute: Any, noise: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(3):
        loss = compute(noise)
        array.zero_grad()
        array.backward(loss)
        array.step()
    return [loss.front().detach(), *array.state_of(2).values()]


@pytest.mark.filterwarnings("ignore:.*script_method")  # of the compiler itself
@pytest.mark.usefixtures("channels_last")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("noise_learns", [False, True])
def test_a_compiled_generator_trains_as_the_plain_one(backend: str, noise_learns: bool) -> None:
    noise = torch.randn(2, 5, 1, 1, requires_grad=noise_learns)
    results = []
    for compiled in (False, True):
        array = array_of_three()

        def loss(noise: Any, array: ModelArray = array) -> torch.Tensor:
            return array(noise).square().mean()

        def plain(noise: Any, array: ModelArray = array, loss: Any = loss) -> Any:
            return array.apply_each(loss, noise)

        compute = array.compile(loss, backend=backend) if compiled else plain
        values = trained(array, compute, noise)
        if noise_learns:
            values.append(noise.grad)
            noise.grad = None
        results.append(values)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_lie_as_the_compiler_is_told() -> None:
    """Whatever layout the arguments have: this is what made compiled backward passes fail."""
    gradient, pictures = torch.randn(2, 8, 4, 4), torch.randn(2, 6, 1, 1)
    filters = torch.randn(6, 4, 4, 4)
    settings = ([1, 1], [0, 0], [0, 0], [1, 1], 2, [True, True])
    real = transposed_gradients(gradient, pictures, filters, *settings)
    with torch._subclasses.FakeTensorMode() as fake:
        told = transposed_gradients(
            *(fake.from_tensor(one) for one in (gradient, pictures, filters)), *settings
        )
    assert [one.stride() for one in real] == [one.stride() for one in told]
    assert real[1].is_contiguous(memory_format=torch.channels_last)
