"""What tells passes apart: inputs, training and autocast. Each kind has a plan of its own."""

from __future__ import annotations

import sys
from typing import Any

import torch

from stepscope.fix.saved.operators import tensors_in


def pass_key(model: torch.nn.Module, inputs: Any) -> tuple[Any, ...]:
    return model.training, _shapes(inputs), _autocast_state()


def device_of(model: torch.nn.Module) -> torch.device:
    """Of the first parameter."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _shapes(inputs: Any) -> tuple[Any, ...]:
    found = tensors_in(list(inputs) if isinstance(inputs, tuple) else inputs)
    return tuple((tuple(t.shape), t.dtype, t.device, t.requires_grad) for t in found)


def _autocast_state() -> tuple[Any, ...]:
    kinds = ("cpu", "cuda")
    return tuple((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)


def is_running(frame: Any) -> bool:
    """Whether it is one of those that called this."""
    current: Any = sys._getframe(1)
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None
