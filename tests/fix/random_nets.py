"""Random small nets out of everything that is difficult for recomputing."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 8
Layer = Callable[[torch.Tensor], torch.Tensor]


def same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Equal where both are NaN, too."""
    return len(first) == len(second) and all(
        torch.equal(one.nan_to_num(nan=1e30), other.nan_to_num(nan=1e30))
        and torch.equal(one.isnan(), other.isnan())
        for one, other in zip(first, second, strict=True)
    )


class RandomNet(nn.Module):
    """Several branches over (batch, channels, height, width), with one to three outputs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._draw = random.Random(seed)
        self.parts = nn.ModuleList()
        self._steps = [self._step() for _ in range(self._draw.randint(4, 9))]
        self._outputs = self._draw.randint(1, 3)
        self.head = nn.Linear(WIDTH, 4)

    def _part(self, module: nn.Module) -> nn.Module:
        """A new module, or one that is already used elsewhere."""
        known = [part for part in self.parts if type(part) is type(module)]
        if known and self._draw.random() < 0.3:
            return self._draw.choice(known)
        self.parts.append(module)
        return module

    def _step(self) -> Layer:
        kind = self._draw.choice(sorted(STEPS))
        return STEPS[kind](self)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = functional.pad(x, (0, 0, 0, 0, 0, WIDTH - x.shape[1]))
        kept = []
        for step in self._steps:
            x = step(x)
            kept.append(x)
        chosen = kept[-self._outputs :]
        return [self.head(value.mean((2, 3))) for value in chosen]


def _convolution(net: RandomNet) -> Layer:
    return net._part(nn.Conv2d(WIDTH, WIDTH, 3, padding=1))


def _norm(net: RandomNet) -> Layer:
    norms = (nn.BatchNorm2d(WIDTH), nn.GroupNorm(2, WIDTH), nn.InstanceNorm2d(WIDTH, affine=True))
    return net._part(net._draw.choice(norms))


def _layer_norm(net: RandomNet) -> Layer:
    norm = net._part(nn.LayerNorm(WIDTH))
    return lambda x: norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _activation(net: RandomNet) -> Layer:
    kinds = (
        nn.ReLU(),
        nn.GELU(),
        nn.Tanh(),
        nn.SiLU(),
        nn.LeakyReLU(0.1),
        nn.Softplus(),
        nn.Hardtanh(),
    )
    return net._draw.choice(kinds)


def _in_place(net: RandomNet) -> Layer:
    """On a fresh tensor: torch would refuse a change of what it saved."""
    choice = net._draw.choice(("relu", "add", "mul", "part"))

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 1.5
        if choice == "relu":
            return functional.relu(y, inplace=True)
        if choice == "add":
            y += x
            return y
        if choice == "mul":
            y.mul_(0.5).tanh_()
            return y
        y[:, 1:3] = 0.25
        y[:, 4].add_(x[:, 5])
        return y

    return step


def _dropout(net: RandomNet) -> Layer:
    kinds = (
        nn.Dropout(0.3),
        nn.Dropout2d(0.2),
        nn.AlphaDropout(0.1),
        nn.Dropout(0.5, inplace=True),
    )
    dropout = net._draw.choice(kinds)
    return lambda x: dropout(x + 1)


def _residual(net: RandomNet) -> Layer:
    inner = [_norm(net), _activation(net), _convolution(net)]

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in inner:
            y = layer(y)
        return x + y

    return step


def _views(net: RandomNet) -> Layer:
    turn = net._draw.randint(1, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=1)
        y = torch.cat([second.sigmoid() * first, first.exp().clamp(max=3)], dim=1)
        return y.flatten(1).roll(turn, 1).view_as(x).transpose(2, 3)

    return step


def _pooling(net: RandomNet) -> Layer:
    pools = (
        nn.MaxPool2d(2, stride=1, padding=1),
        nn.MaxPool2d(3, stride=1, padding=1),
        nn.MaxPool2d(3, stride=1, padding=1, dilation=2),
        nn.AvgPool2d(3, stride=1, padding=1),
        nn.AdaptiveAvgPool2d(5),
    )
    return net._draw.choice(pools)


def _attention(net: RandomNet) -> Layer:
    project = net._part(nn.Linear(WIDTH, 3 * WIDTH))

    def step(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(2).transpose(1, 2)
        query, key, value = project(rows).chunk(3, dim=-1)
        weights = torch.softmax(query @ key.transpose(1, 2) / WIDTH**0.5, -1)
        mixed = functional.dropout(weights, 0.1) @ value
        return mixed.transpose(1, 2).reshape(x.shape)

    return step


def _mask(net: RandomNet) -> Layer:
    return lambda x: torch.where(x > 0.1, x * x, x.sin()).masked_fill(x < -1, 0.5)


def _checkpointed(net: RandomNet) -> Layer:
    inner = nn.Sequential(net._part(nn.Conv2d(WIDTH, WIDTH, 1)), nn.Tanh(), nn.Dropout(0.2))
    return lambda x: checkpoint(inner, x, use_reentrant=False)


def _statistics(net: RandomNet) -> Layer:
    return lambda x: (x - x.mean((0, 2), keepdim=True)) * torch.rsqrt(x.var(1, keepdim=True) + 1)


STEPS: dict[str, Callable[[RandomNet], Layer]] = {
    "convolution": _convolution,
    "norm": _norm,
    "layer norm": _layer_norm,
    "activation": _activation,
    "in place": _in_place,
    "dropout": _dropout,
    "residual": _residual,
    "views": _views,
    "pooling": _pooling,
    "attention": _attention,
    "mask": _mask,
    "checkpointed": _checkpointed,
    "statistics": _statistics,
}
