"""Batches that the script holds besides the one it trains on: a list of them, or prefetched ones.

They grow with the batch, as the one that the step reads. Only reads; nothing is kept alive.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from stepscope.measure.storages import on, pieces

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from stepscope.measure.storages import Key

Form = tuple[tuple[int, ...], torch.dtype]


def form_of(tensor: Any) -> Form:
    """What batches have in common."""
    return tuple(tensor.shape), tensor.dtype


def batch_bytes(
    given: Sequence[tuple[Key, int]], forms: Collection[Form], kind: str
) -> dict[str, int | None]:
    """What the step was given, and what else lives in one of its forms, on this kind of device."""
    mine = [(key, size) for key, size in given if on(key, kind)]
    return {
        "inputs_bytes": sum(size for _, size in mine),
        "prepared_bytes": _other_bytes(forms, {key for key, _ in mine}, kind),
    }


def _other_bytes(forms: Collection[Form], counted: set[Key], kind: str) -> int:
    size = 0
    for tensor in _living_tensors():
        if tensor.requires_grad or tensor.device.type != kind or form_of(tensor) not in forms:
            continue
        for piece in pieces(tensor, set()):
            if piece.key not in counted:
                counted.add(piece.key)
                size += piece.size_bytes
    return size


def _living_tensors() -> list[Any]:
    """Plain ones: a subclass may run code of its own when it is asked."""
    return [item for item in gc.get_objects() if type(item) is torch.Tensor]
