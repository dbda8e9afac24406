"""Element-wise functions, matrix products and reductions, for all models at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from stepscope.fix.fuse.rules.registry import (
    count_of,
    front_of,
    is_tensor,
    positive,
    rule_for,
    writes,
)
from stepscope.fix.fuse.stacked import Stacked

# Functions of each element: any layout will do, as long as all arguments have the same.

_NAMES = [
    "relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "hardtanh",
    "hardswish", "hardsigmoid", "hardshrink", "softplus", "softshrink", "softsign", "tanhshrink",
    "threshold", "logsigmoid", "sigmoid", "tanh", "exp", "expm1", "log", "log1p", "log2", "log10",
    "sqrt", "rsqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "erf", "erfc",
    "abs", "neg", "negative", "positive", "sign", "floor", "ceil", "round", "trunc", "frac",
    "reciprocal", "square", "clamp", "clamp_min", "clamp_max", "clip", "nan_to_num", "add", "sub",
    "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "remainder",
    "fmod", "pow", "rsub", "maximum", "minimum", "fmax", "fmin", "atan2", "where", "masked_fill",
    "lerp", "addcmul", "addcdiv", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or",
    "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not", "isnan", "isinf",
    "isfinite", "clone", "detach", "contiguous", "to", "float", "double", "half", "bfloat16",
    "int", "long", "bool", "type", "type_as", "zeros_like", "ones_like", "full_like",
    "empty_like", "float_power", "xlogy", "logaddexp", "fill", "zero", "copy", "__add__",
    "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
    "__rdiv__", "__pow__", "__rpow__", "__neg__", "__and__", "__or__", "__invert__", "__eq__",
    "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__mod__", "__floordiv__", "__iadd__",
    "__isub__", "__imul__", "__itruediv__", "requires_grad",
]  # fmt: skip


@rule_for(*_NAMES, *(f"{name}_" for name in _NAMES if not name.startswith("__")))
def elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(kwargs.get("out"), torch.Tensor):
        return NotImplemented
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    stacked = [value for value in tensors if isinstance(value, Stacked)]
    keep = _all_by_channel(tensors, stacked)
    ndim = max(value.dim() for value in tensors)

    def physical(value: Any) -> Any:
        if not isinstance(value, Stacked):
            return value
        return value.physical if keep else _aligned(value, ndim)

    result = func(*map(physical, args), **{name: physical(value) for name, value in kwargs.items()})
    if not isinstance(result, torch.Tensor):
        return NotImplemented
    first = args[0]
    if isinstance(first, Stacked) and result is first.physical:
        return first
    together = Stacked(result, count_of(*stacked), "channel" if keep else "front")
    if isinstance(first, Stacked) and writes(func.__name__):
        first.physical, first.order = together.physical, together.order
        return first
    return together


def _all_by_channel(tensors: list[Any], stacked: list[Stacked]) -> bool:
    """Nothing has to be moved: equal ranks and channels, and else only single values."""
    first = stacked[0]
    for value in tensors:
        if isinstance(value, Stacked):
            if value.order != "channel" or value.shape[:2] != first.shape[:2]:
                return False
            if value.dim() != first.dim():
                return False
        elif value.dim():
            return False
    return True


def _aligned(value: Stacked, ndim: int) -> torch.Tensor:
    """With the models in front and as many dimensions as the others, so that it broadcasts."""
    front = value.front()
    missing = ndim - value.dim()
    if not missing:
        return front
    return front.reshape(value.count, *(1,) * missing, *value.shape)


# Matrix products: one batched product for all models.


@rule_for("linear")
def linear(func: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """A batch that all models share goes through one product with all their weights."""
    if not isinstance(weight, Stacked) or weight.dim() != 2:
        return NotImplemented
    count, (outputs, inputs) = weight.count, weight.shape
    shared = x if not isinstance(x, Stacked) else x.common
    if shared is not None:
        flat = None if bias is None else front_of(bias, count).reshape(-1)
        together = func(shared, weight.front().reshape(count * outputs, inputs), flat)
        if together.dim() == 2:
            return Stacked(together, count, "channel")
        return Stacked(together.unflatten(-1, (count, outputs)).movedim(-2, 0), count)
    rows = x.front().reshape(count, -1, inputs)
    turned = weight.front().transpose(1, 2)
    if bias is None:
        product = torch.bmm(rows, turned)
    else:
        product = torch.baddbmm(front_of(bias, count).unsqueeze(1), rows, turned)
    return Stacked(product.reshape(count, *x.shape[:-1], outputs), count)


@rule_for("matmul", "__matmul__", "__rmatmul__", "bmm", "mm")
def matmul(func: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
    if func.__name__ == "__rmatmul__":
        a, b = b, a
    if a.dim() < 2 or b.dim() < 2:
        return NotImplemented
    count, ndim = count_of(a, b), max(a.dim(), b.dim())
    fronts = []
    for value in (a, b):
        if isinstance(value, Stacked):
            ones = (1,) * (ndim - value.dim())
            fronts.append(value.front().reshape(count, *ones, *value.shape))
        else:
            fronts.append(value)
    return Stacked(torch.matmul(*fronts), count)


@rule_for("addmm", "baddbmm")
def addmm(func: Any, added: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    product = (
        matmul(torch.matmul, a, b)
        if isinstance(a, Stacked) or isinstance(b, Stacked)
        else (torch.matmul(a, b))
    )
    return (added * beta + product * alpha).to(product.dtype)  # under autocast the sum is wider


# Sums, means, softmax and the like: over one model's dimensions, never over the models.

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
