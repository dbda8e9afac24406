"""A model whose layers pause instead of computing, so that ranks may share this machine's cores."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


class _Pause(torch.autograd.Function):
    """Hands the values through; backward takes its time."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, pause_s: float) -> torch.Tensor:
        ctx.pause_s = pause_s
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.pause_s)
        return gradients, None


class PausedLayer(nn.Module):
    def __init__(self, width: int, pause_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.pause_s = pause_s

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        # Backward pauses after this layer's gradient.
        return torch.tanh(self.linear(_Pause.apply(values, self.pause_s)))


def paused_model(layers: int, width: int, pause_ms: float) -> nn.Module:
    """The same weights whenever it is called."""
    torch.manual_seed(0)
    return nn.Sequential(*(PausedLayer(width, pause_ms / 1e3) for _ in range(layers)))
