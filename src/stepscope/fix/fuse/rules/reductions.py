"""Sums, means, softmax and the like: over one model's dimensions, never over the models."""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import tree_map

from stepscope.fix.fuse.rules.registry import is_tensor, positive, rule_for
from stepscope.fix.fuse.stacked import Stacked

_OVER_ALL_OR_SOME = [
    "sum", "mean", "prod", "amax", "amin", "std", "var", "all", "any", "logsumexp", "norm",
    "count_nonzero", "argmax", "argmin", "nansum", "nanmean", "median", "max", "min",
]  # fmt: skip
_ALONG_ONE = [
    "softmax", "log_softmax", "softmin", "cumsum", "cumprod", "sort", "argsort", "topk", "cummax",
    "cummin", "glu", "normalize",
]  # fmt: skip


@rule_for(*_OVER_ALL_OR_SOME)
def reduce(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, Stacked) or any(is_tensor(value) for value in (*args, *kwargs.values())):
        return NotImplemented
    args, kwargs = _with_dim_by_name(func.__name__, args, dict(kwargs))
    dim = kwargs.pop("dim", kwargs.pop("axis", None))
    if dim is None:
        front = x.front()
        flat = front.reshape(x.count, -1)
        result = func(flat, *args, **kwargs, dim=1)
        if func.__name__ in ("max", "min", "median"):
            result = result.values
        return Stacked(result, x.count)
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    places = tuple(positive(one, x.dim()) for one in dims)
    if x.order == "channel" and all(place > 1 for place in places):
        wanted = places[0] if isinstance(dim, int) else places
        result = func(x.physical, *args, **kwargs, dim=wanted)
        if is_tensor(result):
            return Stacked(result, x.count, "channel")
    wanted = places[0] + 1 if isinstance(dim, int) else tuple(place + 1 for place in places)
    return _wrapped(func(x.front(), *args, **kwargs, dim=wanted), x.count)


def _with_dim_by_name(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Where `dim` was given by its place. `norm` takes p first."""
    place = 1 if name == "norm" else 0
    if len(args) <= place:
        return args, kwargs
    given = args[place]
    if name in ("std", "var") and isinstance(given, bool):  # unbiased, over all
        return (), {**kwargs, "unbiased": given}
    rest = args[place + 1 :]
    known = {**kwargs, "dim": given}
    if rest:
        known["unbiased" if name in ("std", "var") else "keepdim"] = rest[0]
    return args[:place], known


@rule_for(*_ALONG_ONE)
def along_one(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, Stacked) or any(is_tensor(value) for value in (*args, *kwargs.values())):
        return NotImplemented
    name, known = func.__name__, dict(kwargs)
    known.pop("_stacklevel", None)
    place = {"topk": 1, "normalize": 1}.get(name, 0)
    if "dim" not in known:
        if len(args) <= place:
            default = {"topk": -1, "sort": -1, "argsort": -1, "glu": -1, "normalize": 1}.get(name)
            if default is None:
                return NotImplemented
            known["dim"] = default
        else:
            known["dim"] = args[place]
            if args[place + 1 :]:
                return NotImplemented
            args = args[:place]
    if known["dim"] is None:
        return NotImplemented
    known["dim"] = positive(known["dim"], x.dim()) + 1
    return _wrapped(func(x.front(), *args, **known), x.count)


def _wrapped(result: Any, count: int) -> Any:
    if is_tensor(result):
        return Stacked(result, count)
    return tree_map(lambda value: Stacked(value, count) if is_tensor(value) else value, result)
