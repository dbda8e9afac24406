"""A training step of a model on a device, and the parts of such steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    Loss = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """`passes` run one after the other, each followed by its own optimizer's step."""

    modules: tuple[nn.Module, ...]
    passes: tuple[Loss, ...]


def classifier(model: nn.Module, x: torch.Tensor, classes: int) -> Workload:
    model.to(x.device)
    y = torch.randint(0, classes, (len(x),), device=x.device)
    return Workload((model,), (lambda: functional.cross_entropy(model(x), y),))


def language(model: nn.Module, device: str, batch: int, words: int, length: int) -> Workload:
    model.to(device)
    ids = torch.randint(0, words, (batch, length + 1), device=device)

    def loss() -> torch.Tensor:
        logits = model(ids[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return Workload((model,), (loss,))


def parameters(modules: tuple[nn.Module, ...]) -> list[list[Any]]:
    return [list(module.parameters()) for module in modules]
