"""Random small nets of the operators that fuse knows, with random settings: fused as alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from twins import assert_same, train_both

optim = torch.optim
TRIED = 12


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.inner(x)
        return result


class Gate(nn.Module):
    """Squeeze and excite."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, 2), nn.Linear(2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        open_by = torch.sigmoid(self.up(torch.relu(self.down(x.mean((2, 3))))))
        result: torch.Tensor = x * open_by[:, :, None, None]
        return result


def picture_layer(draw: random.Random, width: int) -> tuple[nn.Module, int]:
    """A layer for pictures of `width` channels, and the channels that it gives."""
    other = draw.choice([4, 6, 8])
    kinds: list[tuple[Callable[[], nn.Module], int]] = [
        (lambda: nn.Conv2d(width, other, 3, padding=1, bias=draw.random() < 0.5), other),
        (lambda: nn.Conv2d(width, width, 3, padding=1, groups=2), width),
        (lambda: nn.ConvTranspose2d(width, other, 3, padding=1), other),
        (lambda: nn.BatchNorm2d(width, affine=draw.random() < 0.7), width),
        (lambda: nn.GroupNorm(2, width), width),
        (lambda: nn.InstanceNorm2d(width), width),
        (lambda: nn.ReLU(inplace=draw.random() < 0.5), width),
        (lambda: nn.PReLU(draw.choice([1, width])), width),
        (nn.SiLU, width),
        (lambda: nn.Dropout(draw.choice([0.1, 0.5])), width),
        (lambda: nn.Dropout2d(0.2), width),
        (lambda: nn.MaxPool2d(3, 1, 1), width),
        (lambda: nn.AvgPool2d(3, 1, 1), width),
        (lambda: Gate(width), width),
        (lambda: Residual(nn.Conv2d(width, width, 3, padding=1)), width),
        (lambda: nn.Upsample(scale_factor=1.5), width),
    ]
    make, gives = draw.choice(kinds)
    return make(), gives


def row_layer(draw: random.Random, width: int) -> tuple[nn.Module, int]:
    other = draw.choice([4, 6, 8])
    kinds: list[tuple[Callable[[], nn.Module], int]] = [
        (lambda: nn.Linear(width, other), other),
        (lambda: nn.BatchNorm1d(width), width),
        (lambda: nn.LayerNorm(width), width),
        (nn.GELU, width),
        (nn.Tanh, width),
        (lambda: nn.Dropout(0.3), width),
        (lambda: nn.Softmax(-1), width),
        (lambda: Residual(nn.Sequential(nn.Linear(width, width), nn.ReLU())), width),
    ]
    make, gives = draw.choice(kinds)
    return make(), gives


def random_net(seed: int) -> nn.Module:
    """The same architecture for the same seed; torch draws the weights."""
    draw = random.Random(seed)
    layers: list[nn.Module] = []
    width = 4
    for _ in range(draw.randint(1, 5)):
        layer, width = picture_layer(draw, width)
        layers.append(layer)
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    width *= 4
    for _ in range(draw.randint(1, 4)):
        layer, width = row_layer(draw, width)
        layers.append(layer)
    return nn.Sequential(*layers, nn.Linear(width, 3))


def random_optimizers(seed: int) -> Callable[[Any], list[Any]]:
    draw = random.Random(seed)
    kind: Any = draw.choice([optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad])

    def make(models: Any) -> list[Any]:
        own = random.Random(seed)
        return [
            kind(
                model.parameters(),
                lr=own.choice([1e-2, 1e-3]),
                weight_decay=own.choice([0.0, 0.1]),
            )
            for model in models
        ]

    return make


def check(seed: int) -> None:
    draw = random.Random(seed)
    trained = train_both(
        lambda: random_net(seed),
        lambda: (torch.randn(4, 4, 6, 6),),
        optimizers=random_optimizers(seed),
        count=draw.randint(1, 5),
        shared=draw.random() < 0.3,
        steps=3,
    )
    assert_same(trained, 1e-8)
    assert set(trained.array.report()["functions"]) <= {"fused", "once"}


@pytest.mark.parametrize("seed", range(TRIED))
def test_random_net(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(TRIED, TRIED + 200))
def test_more_random_nets(seed: int) -> None:
    check(seed)
