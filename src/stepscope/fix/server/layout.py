"""Which shard holds which tensor, and where each lies in the shard's one flat message."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ALIGN_BYTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlace:
    """One parameter and its bytes in the flat message."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    offset: int
    size_bytes: int
    trained: bool = True

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The tensors of one shard in the model's order."""

    places: tuple[TensorPlace, ...]
    size_bytes: int

    def views(self, flat: Any) -> dict[str, Any]:
        """Each tensor as a window into the flat bytes."""
        return {
            place.name: flat[place.offset : place.offset + place.size_bytes]
            .view(place.dtype)
            .view(place.shape)
            for place in self.places
        }

    def with_dtype(self, dtype: Any) -> Layout:
        """The same tensors, floating-point numbers wider than `dtype` stored as `dtype`."""
        return lay_out(
            [
                (
                    one.name,
                    one.shape,
                    dtype if _is_wider(one.dtype, dtype) else one.dtype,
                    one.trained,
                )
                for one in self.places
            ]
        )


def _is_wider(dtype: Any, than: Any) -> bool:
    return bool(dtype.is_floating_point and dtype.itemsize > than.itemsize)


def lay_out(tensors: Sequence[tuple[str, tuple[int, ...], Any, bool]]) -> Layout:
    """One after another; each begins where any type may begin."""
    places, offset = [], 0
    for name, shape, dtype, trained in tensors:
        size = math.prod(shape) * dtype.itemsize
        places.append(
            TensorPlace(
                name=name,
                shape=tuple(shape),
                dtype=dtype,
                offset=offset,
                size_bytes=size,
                trained=trained,
            )
        )
        offset += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
    return Layout(places=tuple(places), size_bytes=offset)


def assign(sizes: Mapping[str, int], shards: int) -> list[list[str]]:
    """Names by shard: the largest tensor first, each to the shard with the fewest bytes so far.
    Within a shard, names keep the order of `sizes`."""
    load = [0] * shards
    chosen: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        shard = min(range(shards), key=lambda shard: (load[shard], shard))
        chosen[name] = shard
        load[shard] += sizes[name]
    return [[name for name in sizes if chosen[name] == shard] for shard in range(shards)]


def shard_layouts(tensors: Mapping[str, Any], shards: int) -> list[Layout]:
    """Of the named parameters of a model. UsageError where there is nothing for a shard."""
    if shards < 1:
        raise UsageError(f"shards={shards}: a parameter server needs at least one shard")
    if len(tensors) < shards:
        raise UsageError(
            f"shards={shards}, but the model has {len(tensors)} parameter tensors: use at most "
            "one shard for each"
        )
    sizes = {name: one.numel() * one.element_size() for name, one in tensors.items()}
    return [
        lay_out(
            [
                (name, tuple(tensors[name].shape), tensors[name].dtype, _is_trained(tensors[name]))
                for name in names
            ]
        )
        for names in assign(sizes, shards)
    ]


def _is_trained(tensor: Any) -> bool:
    return bool(tensor.requires_grad)


def flatten(layout: Layout, tensors: Mapping[str, Any], out: Any | None = None) -> Any:
    """Copy tensors into one flat array of bytes, on the device of `out`."""
    flat = torch.zeros(layout.size_bytes, dtype=torch.uint8) if out is None else out
    for name, view in layout.views(flat).items():
        view.copy_(tensors[name].detach())
    return flat


def unflatten(layout: Layout, flat: Any, into: Mapping[str, Any]) -> None:
    """Copy the flat bytes into tensors, whose device may be another."""
    first = next(iter(into.values()), None)
    if first is not None and first.device != flat.device:
        flat = flat.to(first.device)
    for name, view in layout.views(flat).items():
        into[name].copy_(view)
