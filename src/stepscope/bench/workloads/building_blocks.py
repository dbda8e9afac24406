"""Share what workloads have in common: sizes, the step that trains on batches in turn, layers.

Settings that many of them have: `batches` are those that training goes round, of all `classes` only
the first `directions` (or `speeds`) occur, and texts use the first `known` of all `words`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, wraps
from itertools import islice, pairwise
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Config, Size, Step, TrainingPlace, descend

Batch = TypeVar("Batch")
Labelled = tuple[torch.Tensor, torch.Tensor]  # inputs and what the model is to say of them

SGD = partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-4)


def in_sizes(
    base: Mapping[str, Any],
    *,
    tiny: Mapping[str, Any],
    small: Mapping[str, Any] = {},
    paper: Mapping[str, Any] = {},
) -> dict[Size, Mapping[str, Any]]:
    """Return the settings of each size: `base` with what differs there."""
    return {"tiny": {**base, **tiny}, "small": {**base, **small}, "paper": {**base, **paper}}


def in_batches(
    draw_batches: Callable[[Config, torch.Generator], Iterator[Batch]],
) -> Callable[[Config, TrainingPlace], list[Batch]]:
    """Draw from an endless generator the batches that training goes round."""

    @wraps(draw_batches)
    def make(config: Config, place: TrainingPlace) -> list[Batch]:
        return list(islice(draw_batches(config, place.generator()), config.batches))

    return make


def class_loss(model: nn.Module, batch: Labelled) -> torch.Tensor:
    inputs, labels = batch
    return functional.cross_entropy(model(inputs).float(), labels)


def words_loss(
    logits: torch.Tensor, words: torch.Tensor, *, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return the cross-entropy of logits (batch, length, words)."""
    flat = logits.flatten(0, 1).float()
    return functional.cross_entropy(flat, words.flatten(), label_smoothing=label_smoothing)


def train_on(
    batches: Callable[[Config, TrainingPlace], list[Batch]],
    model: Callable[[Config], nn.Module],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    loss: Callable[[nn.Module, Batch], torch.Tensor] = class_loss,  # type: ignore[assignment]
    *,
    clip: float | None = None,
) -> Callable[[Config, TrainingPlace], Step]:
    """Return a workload's `build`, whose steps descend `loss(model, batch)`."""

    def build(config: Config, place: TrainingPlace) -> Step:
        net = place.put(model(config))
        descent = optimizer(net.parameters(), lr=config.lr)
        drawn = batches(config, place)

        def step(number: int) -> torch.Tensor:
            return descend(descent, loss(net, drawn[number % len(drawn)]), clip=clip)

        return step

    return build


# Layers.


class Mean(nn.Module):
    def __init__(self, *dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(self.dimensions)


def stacked(widths: Iterable[int], layer: Callable[[int, int], Iterable[nn.Module]]) -> nn.Module:
    """Return the modules of `layer` for each pair of neighbouring widths, one after the other."""
    return nn.Sequential(*(module for pair in pairwise(widths) for module in layer(*pair)))


def feed_forward(width: int, inner: int, activation: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), activation or nn.GELU(), nn.Linear(inner, width))


def convolution(
    inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1, **norm: float
) -> tuple[nn.Module, ...]:
    """Return a convolution and its norm."""
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False)
    return layer, nn.BatchNorm2d(outputs, **norm)


lean_convolution = partial(convolution, eps=1e-3, momentum=0.01)  # as the mobile nets' papers


def whole_eights(channels: float) -> int:
    """Return the nearest multiple of eight, at least eight and nine tenths of `channels`."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8


def initialize_convolutions(model: nn.Module) -> None:
    """Draw weights as He et al., 2015: the variance stays the same from layer to layer."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Return attention's result with the heads side by side: (batch, length, width)."""
    mixed = functional.scaled_dot_product_attention(query, key, value, **options)
    return mixed.transpose(1, 2).flatten(2)
