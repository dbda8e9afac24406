"""Functions of each element: any layout will do, as long as all arguments have the same."""

from __future__ import annotations

from typing import Any

import torch

from stepscope.fix.fuse.rules.registry import count_of, rule_for, writes
from stepscope.fix.fuse.stacked import Stacked

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
