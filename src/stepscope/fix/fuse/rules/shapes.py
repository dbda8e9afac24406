"""Views, permutations, joins and parts: as one model sees them, after the models' own dimension."""

from __future__ import annotations

from typing import Any

import torch

from stepscope.fix.fuse.rules.registry import count_of, front_of, positive, rule_for
from stepscope.fix.fuse.stacked import Stacked

_PICKED = {"gather": ("dim", "index"), "take_along_dim": ("indices", "dim")}


def _sizes(sizes: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    given = sizes or (kwargs.get("size") or kwargs.get("shape"),)
    return tuple(given[0]) if len(given) == 1 and not isinstance(given[0], int) else given


@rule_for("view", "reshape", "unsafe_view")
def view(func: Any, x: Stacked, *sizes: Any, **kwargs: Any) -> Any:
    wanted = _sizes(sizes, kwargs)
    if any(not isinstance(size, int) for size in wanted):  # view(dtype)
        return NotImplemented
    return Stacked(x.front().reshape(x.count, *wanted), x.count)


@rule_for("view_as", "reshape_as", "expand_as")
def like(func: Any, x: Any, other: torch.Tensor) -> Any:
    if not isinstance(x, Stacked):
        return NotImplemented
    front, shape = x.front(), (x.count, *other.shape)
    if func.__name__ == "expand_as":
        return Stacked(_room_for(x, other.dim()).expand(shape), x.count)
    return Stacked(front.reshape(shape), x.count)


@rule_for("flatten")
def flatten(func: Any, x: Stacked, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = positive(start_dim, x.dim()), positive(end_dim, x.dim())
    if x.dim() == 0:
        return Stacked(x.front().reshape(x.count, 1), x.count)
    return Stacked(x.front().flatten(start + 1, end + 1), x.count)


@rule_for("unflatten")
def unflatten(func: Any, x: Stacked, dim: int, sizes: Any) -> Any:
    return Stacked(x.front().unflatten(positive(dim, x.dim()) + 1, sizes), x.count)


@rule_for("permute")
def permute(func: Any, x: Stacked, *dims: Any, **kwargs: Any) -> Any:
    wanted = _sizes(dims, {"size": kwargs.get("dims")})
    return Stacked(x.front().permute(0, *(positive(dim, x.dim()) + 1 for dim in wanted)), x.count)


@rule_for("transpose", "swapaxes", "swapdims", "movedim", "moveaxis")
def transpose(func: Any, x: Stacked, first: int, second: int) -> Any:
    if not isinstance(first, int) or not isinstance(second, int):
        return NotImplemented
    a, b = (positive(dim, x.dim()) + 1 for dim in (first, second))
    name = "movedim" if func.__name__.startswith("move") else "transpose"
    return Stacked(getattr(x.front(), name)(a, b), x.count)


@rule_for("t")
def t(func: Any, x: Stacked) -> Any:
    return x.transpose(0, 1) if x.dim() == 2 else x


@rule_for("squeeze")
def squeeze(func: Any, x: Stacked, dim: Any = None) -> Any:
    if dim is None:
        shape = [size for size in x.shape if size != 1]
        return Stacked(x.front().reshape(x.count, *shape), x.count)
    dims = (dim,) if isinstance(dim, int) else dim
    return Stacked(x.front().squeeze(tuple(positive(one, x.dim()) + 1 for one in dims)), x.count)


@rule_for("unsqueeze")
def unsqueeze(func: Any, x: Stacked, dim: int) -> Any:
    return Stacked(x.front().unsqueeze(positive(dim, x.dim() + 1) + 1), x.count)


@rule_for("expand", "repeat")
def expand(func: Any, x: Stacked, *sizes: Any, **kwargs: Any) -> Any:
    wanted = _sizes(sizes, kwargs)
    front = _room_for(x, len(wanted))
    if func.__name__ == "repeat":
        return Stacked(front.repeat(1, *wanted), x.count)
    return Stacked(front.expand(x.count, *wanted), x.count)


def _room_for(x: Stacked, ndim: int) -> torch.Tensor:
    """Expanding adds dimensions in front of the model's own."""
    return x.front().reshape(x.count, *(1,) * (ndim - x.dim()), *x.shape)


@rule_for("chunk", "split", "tensor_split", "unsafe_chunk", "unsafe_split")
def parts(func: Any, x: Stacked, how: Any = None, dim: int = 0, **kwargs: Any) -> Any:
    names = ("chunks", "split_size_or_sections", "split_size", "indices_or_sections")
    how = how if how is not None else next(kwargs[name] for name in names if name in kwargs)
    pieces = getattr(x.front(), func.__name__)(how, dim=positive(dim, x.dim()) + 1)
    return tuple(Stacked(piece, x.count) for piece in pieces)


@rule_for("unbind")
def unbind(func: Any, x: Stacked, dim: int = 0) -> Any:
    return tuple(Stacked(p, x.count) for p in x.front().unbind(positive(dim, x.dim()) + 1))


@rule_for("select", "narrow", "index_select")
def part(func: Any, x: Any, dim: int, *rest: Any) -> Any:
    if not isinstance(x, Stacked) or any(isinstance(value, Stacked) for value in rest):
        return NotImplemented
    return Stacked(getattr(x.front(), func.__name__)(positive(dim, x.dim()) + 1, *rest), x.count)


@rule_for("gather", "take_along_dim")
def pick(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """gather(dim, index); take_along_dim has them the other way round."""
    known = {**dict(zip(_PICKED[func.__name__], args, strict=False)), **kwargs}
    index = known.pop("index", known.pop("indices", None))
    dim = known.pop("dim", None)
    if known or not isinstance(dim, int) or index is None or index.dim() != x.dim():
        return NotImplemented
    count = count_of(x, index)
    values, places, along = front_of(x, count), front_of(index, count), positive(dim, x.dim()) + 1
    if func.__name__ == "gather":
        return Stacked(torch.gather(values, along, places), count)
    return Stacked(torch.take_along_dim(values, places, along), count)


@rule_for("cat", "concat", "concatenate", "stack")
def join(func: Any, tensors: Any, dim: int = 0, *, axis: int | None = None) -> Any:
    values = list(tensors)
    dim = dim if axis is None else axis
    if func.__name__ != "stack":  # torch leaves out what is empty, whatever its dimensions
        values = [value for value in values if value.shape != (0,)] or values
    ndim = max(value.dim() for value in values) + (func.__name__ == "stack")
    count, place = count_of(*values), positive(dim, ndim)
    joins = torch.stack if func.__name__ == "stack" else torch.cat
    return Stacked(joins([front_of(value, count) for value in values], place + 1), count)


@rule_for("__getitem__")
def getitem(func: Any, x: Any, index: Any) -> Any:
    indices = index if isinstance(index, tuple) else (index,)
    simple = all(isinstance(one, int | slice | type(None) | type(Ellipsis)) for one in indices)
    if not simple or not isinstance(x, Stacked):
        return NotImplemented
    return Stacked(x.front()[(slice(None), *indices)], x.count)


@rule_for("__setitem__")
def setitem(func: Any, x: Any, index: Any, value: Any) -> Any:
    indices = index if isinstance(index, tuple) else (index,)
    if not isinstance(x, Stacked) or any(isinstance(one, Stacked) for one in indices):
        return NotImplemented
    front = x.front()
    place = front[(slice(None), *indices)]
    if isinstance(value, Stacked):
        missing = place.dim() - 1 - value.dim()
        value = value.front().reshape(x.count, *(1,) * missing, *value.shape)
    front[(slice(None), *indices)] = value
    return None


@rule_for("roll", "flip")
def along(func: Any, x: Stacked, *args: Any, **kwargs: Any) -> Any:
    dims = kwargs.pop("dims", None)
    if func.__name__ == "flip":
        given = dims if dims is not None else (args if isinstance(args[0], int) else args[0])
        return Stacked(x.front().flip([positive(dim, x.dim()) + 1 for dim in given]), x.count)
    dims = dims if dims is not None else (args[1] if len(args) > 1 else None)
    if dims is None:
        return NotImplemented
    wanted = (dims,) if isinstance(dims, int) else dims
    shifts = args[0] if args else kwargs["shifts"]
    moved = [positive(dim, x.dim()) + 1 for dim in wanted]
    return Stacked(x.front().roll(shifts, moved if len(moved) > 1 else moved[0]), x.count)
