"""Shapes as people write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.records.efficiency import Spot

MOST = 3  # shapes in a sentence


def which_call(spot: Spot, most: int | None = None) -> str:
    """What tells a row of the roofline from others of its operator: shapes, else a line."""
    words = shape_words(spot.shapes, most)
    return words if words or spot.place is None else spot.place.short


def shape_words(shapes: str, most: int | None = None) -> str:
    """`8192×768, 768×2304` of the profiler's JSON; arguments without a shape are left out."""
    try:
        given = msgspec.json.decode(shapes)
    except msgspec.DecodeError:
        return shapes
    if not isinstance(given, list):
        return shapes
    words = [word for dims in given if isinstance(dims, list) and dims and (word := _dims(dims))]
    if most is not None and len(words) > most:
        words = [*words[:most], "…"]
    return ", ".join(words)


def _dims(dims: list[object]) -> str:
    if any(isinstance(size, list) for size in dims):
        return counted(len(dims), "tensor")
    return "×".join(map(str, dims))
