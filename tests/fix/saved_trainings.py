"""Trainings with which the tests of save_memory compare its own to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Torch also fills new memory with NaN then: whoever reads it is found out."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    return nn.Sequential(*layers), torch.randn(512, 64)


def trained(
    model: nn.Module,
    batch: torch.Tensor | Callable[[], torch.Tensor],
    steps: int = 8,
    rate: float = 0.0,
    seed: int = 1,
) -> list[torch.Tensor]:
    """Every step's loss and gradients; with a learning rate also where the training ended."""
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = model(batch() if callable(batch) else batch)
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        loss = torch.stack([output.square().mean() for output in outputs]).sum()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        if rate:
            optimizer.step()
    return [*seen, *(value.clone() for value in model.state_dict().values())] if rate else seen
