"""How large a batch is, from the shapes of its tensors: nothing is computed or copied."""

from __future__ import annotations

import sys
from typing import Any

_MOST_PARTS = 64
_DEEPEST = 3
_PAIR = 2  # inputs and labels
_TOKENS = "input_ids"
_PLAIN = (str, int, float, bool, bytes, type(None))


class _TooManyPartsError(Exception):
    pass


def count_elements(batch: Any) -> int:
    """Elements of the tensors in a batch; 0 when it has none, or too many to look at each time.

    A batch with `input_ids` counts its tokens alone: masks and labels only repeat their shape.
    """
    try:
        tensor = sys.modules["torch"].Tensor
        kind = type(batch)
        # Most batches are one of these. A call costs much while the processor's caches are cold.
        if kind is dict and type(tokens := batch.get(_TOKENS)) is tensor:
            return int(tokens.numel())
        if (kind is list or kind is tuple) and len(batch) == _PAIR:
            first, second = batch
            if type(first) is tensor and type(second) is tensor:
                return int(first.numel() + second.numel())
        return _count(batch, tensor, [_MOST_PARTS], _DEEPEST)
    except Exception:
        return 0


def _count(part: Any, tensor: Any, left: list[int], deeper: int) -> int:
    left[0] -= 1
    if left[0] < 0:
        raise _TooManyPartsError
    kind = type(part)
    if issubclass(kind, tensor):
        return int(part.numel())
    inside = _parts(part, kind) if deeper and kind not in _PLAIN else ()
    total = 0
    for value in inside:
        total += _count(value, tensor, left, deeper - 1)
    return total


def _parts(part: Any, kind: type) -> Any:
    """What a container holds; a list of names holds nothing of interest."""
    if issubclass(kind, (tuple, list)):
        return () if part and type(part[0]) in _PLAIN else part
    held = part if issubclass(kind, dict) else _held_dict(part)
    tokens = held.get(_TOKENS)
    return (tokens,) if tokens is not None else held.values()


def _held_dict(part: Any) -> dict[Any, Any]:
    """The dict in a BatchEncoding (`data`) or a graph (`_store`), else the object's attributes.

    An attribute may be computed when it is asked for: only stored ones are read.
    """
    own: dict[Any, Any] = object.__getattribute__(part, "__dict__")
    store = own.get("_store")
    if store is not None:
        own = object.__getattribute__(store, "__dict__")
    for name in ("_mapping", "data"):
        if isinstance(own.get(name), dict):
            return own[name]  # type: ignore[no-any-return]
    return own


def parts_of(part: Any) -> Any:
    """Everything that a container of a batch holds; nothing for a plain value."""
    kind = type(part)
    if kind in _PLAIN:
        return ()
    if issubclass(kind, (tuple, list)):
        return part
    try:
        return (part if issubclass(kind, dict) else _held_dict(part)).values()
    except AttributeError:
        return ()
