"""Gradients as one message per shard: as they are, as bf16, or the largest few.

`top-k:0.01` sends a hundredth of the numbers. What is not sent is added to the next gradient (error
feedback), so that nothing is forgotten, only delayed.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stepscope.fix.server.layout import Layout


@dataclass(frozen=True, slots=True)
class Compression:
    """How gradients travel. `share` is the part of the numbers that top-k sends."""

    kind: str  # "none", "bf16" or "top-k"
    share: float = 1.0

    @classmethod
    def parse(cls, text: str | None) -> Compression:
        if text is None or text == "bf16":
            return cls(text or "none")
        spelled = re.fullmatch(r"top-k:(\d*\.?\d+)", text)
        if spelled is not None and 0.0 < float(spelled[1]) <= 1.0:
            return cls("top-k", float(spelled[1]))
        raise UsageError(
            f'compression "{text}" is unknown. Use None, "bf16", or "top-k:0.01" for '
            "the largest hundredth of the gradient"
        )

    @property
    def words(self) -> str:
        """As `parse` takes it."""
        return f"top-k:{self.share:g}" if self.kind == "top-k" else self.kind

    def travel_layout(self, layout: Layout) -> Layout:
        return layout.with_dtype(torch.bfloat16) if self.kind == "bf16" else layout


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedGradients:
    """`present` are the places of tensors that have a gradient at all. `chosen` holds, for top-k,
    the elements sent of each such tensor, counted from its beginning."""

    present: tuple[int, ...]
    flat: Any  # bytes; for top-k, the chosen values of all tensors one after another
    chosen: tuple[Any, ...] | None = None

    @property
    def size_bytes(self) -> int:
        chosen = sum(one.nbytes for one in self.chosen) if self.chosen is not None else 0
        return int(self.flat.nbytes + chosen)


class GradientPacker:
    """Packs one worker's gradients for one shard; keeps what top-k left out."""

    def __init__(self, compression: Compression, layout: Layout) -> None:
        self._compression = compression
        self._layout = compression.travel_layout(layout)
        self._left_out: dict[int, Any] = {}

    def pack(self, gradients: Mapping[str, Any]) -> PackedGradients:
        """Gradients by name; a parameter without one is not in the message."""
        present = tuple(
            index
            for index, place in enumerate(self._layout.places)
            if gradients.get(place.name) is not None
        )
        dense = {index: _dense(gradients[self._layout.places[index].name]) for index in present}
        if self._compression.kind == "top-k":
            return self._pack_largest(dense)
        return self._pack_all(dense)

    def _pack_all(self, dense: dict[int, Any]) -> PackedGradients:
        device = next(iter(dense.values())).device if dense else "cpu"
        flat = torch.zeros(self._layout.size_bytes, dtype=torch.uint8, device=device)
        views = list(self._layout.views(flat).values())
        for index, gradient in dense.items():
            views[index].copy_(gradient)
        return PackedGradients(present=tuple(dense), flat=flat.cpu().numpy())

    def _pack_largest(self, dense: dict[int, Any]) -> PackedGradients:
        chosen, values = [], []
        for index, gradient in dense.items():
            whole = gradient.reshape(-1).clone()
            if index in self._left_out:
                whole += self._left_out[index]
            kept = max(1, round(self._compression.share * whole.numel())) if whole.numel() else 0
            places = torch.topk(whole.abs(), kept, sorted=False).indices.sort().values
            picked = whole[places]
            whole[places] = 0
            self._left_out[index] = whole
            chosen.append(places.to(torch.int32).cpu().numpy())
            values.append(picked.cpu().contiguous().view(torch.uint8).numpy())
        flat = np.concatenate(values) if values else np.zeros(0, np.uint8)
        return PackedGradients(present=tuple(dense), flat=flat, chosen=tuple(chosen))


def unpack(compression: Compression, layout: Layout, packed: PackedGradients) -> dict[str, Any]:
    """Gradients by name in the parameters' own types; parameters without one are left out."""
    if packed.chosen is not None:
        return _unpack_largest(layout, packed)
    travelled = compression.travel_layout(layout)
    views = list(travelled.views(as_tensor(packed.flat)).values())
    return {
        layout.places[index].name: views[index].to(layout.places[index].dtype)
        for index in packed.present
    }


def _unpack_largest(layout: Layout, packed: PackedGradients) -> dict[str, Any]:
    assert packed.chosen is not None
    gradients, offset = {}, 0
    for index, chosen in zip(packed.present, packed.chosen, strict=True):
        place = layout.places[index]
        size = len(chosen) * place.dtype.itemsize
        # A copy: in this message no value begins at a multiple of its size.
        values = (
            torch.frombuffer(bytearray(packed.flat[offset : offset + size]), dtype=place.dtype)
            if size
            else torch.zeros(0, dtype=place.dtype)
        )
        whole = torch.zeros(place.elements, dtype=place.dtype)
        whole[as_tensor(chosen).long()] = values
        gradients[place.name] = whole.view(place.shape)
        offset += size
    return gradients


def as_tensor(array: Any) -> Any:
    """Ray's store gives read-only arrays, and torch has no such tensors: nobody writes to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _dense(gradient: Any) -> Any:
    whole = gradient.detach()
    return whole.to_dense() if whole.layout != torch.strided else whole
