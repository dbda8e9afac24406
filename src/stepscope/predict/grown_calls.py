"""A step's operator calls with another batch: which sides of their tensors grow.

A trace has shapes but no names of dimensions. A side grows if it is a multiple of the batch and
comes first, or is the batch itself and comes second; parameters keep their shapes, and so does what
has an entry for each group of rows. Where that is wrong, the operator refuses such tensors, and the
call counts as not known.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from stepscope.predict.step_operators import TracedCall

    Shape = tuple[int, ...]

# Operators whose plain argument is the shape of their result.
_SHAPED_BY = frozenset(
    f"aten::{name}" for name in ("view", "reshape", "_unsafe_view", "expand", "zeros", "ones")
)
# Arguments with an entry for each group of rows, such as those of an expert: the rows grow.
_PER_GROUP = {"aten::_grouped_mm": (1, 2), "aten::_scaled_grouped_mm": (1, 3, 4)}


def grow_calls(
    calls: Sequence[TracedCall], parameters: Collection[Shape], *, batch: int, factor: float
) -> tuple[TracedCall, ...]:
    """The optimizer's calls stay as they are."""
    grown: dict[int, TracedCall] = {}  # equal calls are one object
    for call in calls:
        if call.in_forward and id(call) not in grown:
            grown[id(call)] = _grow_call(call, parameters, batch, factor)
    return tuple(grown.get(id(call), call) for call in calls)


def _grow_call(
    call: TracedCall, parameters: Collection[Shape], batch: int, factor: float
) -> TracedCall:
    def grow(dims: Any, steps: Any) -> tuple[Any, Any]:
        if dims and isinstance(dims[0], list):
            each_steps = steps if steps and len(steps) == len(dims) else [None] * len(dims)
            pairs = [grow(one, step) for one, step in zip(dims, each_steps, strict=True)]
            return [pair[0] for pair in pairs], [pair[1] for pair in pairs] if steps else steps
        place = None if _is_parameter(dims, parameters) else _growing_side(dims, batch)
        if place is None:
            return dims, steps
        return _with_side(dims, place, factor), _with_steps(steps, place, factor)

    strides = call.strides or (None,) * len(call.shapes)
    stays = _PER_GROUP.get(call.name, ())
    pairs = [
        (dims, steps) if at in stays else grow(dims, steps)
        for at, (dims, steps) in enumerate(zip(call.shapes, strides, strict=True))
    ]
    concrete = call.concrete
    if call.name in _SHAPED_BY:
        concrete = tuple(_grow_text(text, batch, factor) for text in concrete)
    return replace(
        call,
        shapes=tuple(pair[0] for pair in pairs),
        strides=tuple(pair[1] for pair in pairs) if call.strides else (),
        concrete=concrete,
    )


def _is_parameter(dims: Sequence[int], parameters: Collection[Shape]) -> bool:
    """Also transposed, as products take weights."""
    return tuple(dims) in parameters or (*dims[:-2], *dims[-2:][::-1]) in parameters


def _growing_side(dims: Sequence[int], batch: int) -> int | None:
    if dims and dims[0] and dims[0] % batch == 0:
        return 0
    return 1 if len(dims) > 1 and dims[1] == batch else None


def _with_side(dims: Sequence[int], place: int, factor: float) -> list[int]:
    return [round(side * factor) if at == place else side for at, side in enumerate(dims)]


def _with_steps(steps: Any, place: int, factor: float) -> Any:
    """Dimensions that step over the growing one step farther."""
    if not steps or place >= len(steps):
        return steps
    return [round(step * factor) if step > steps[place] else step for step in steps]


def _grow_text(text: str, batch: int, factor: float) -> str:
    """A list of sides such as [4, 96, 128]; any other argument stays."""
    try:
        dims = msgspec.json.decode(text, type=list[int])
    except (msgspec.DecodeError, msgspec.ValidationError):
        return text
    place = _growing_side(dims, batch)
    return text if place is None else json.dumps(_with_side(dims, place, factor))
