"""Repeated calls with as little Python as possible.

An overload that is called from Python looks up its schema for every argument. Torch's own bindings
(`torch.relu`) take half as long, and mostly end at the same overload. Whether they do is seen when
a call is repeated for the first time: then it runs under a mode that notes what is dispatched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.fix.saved.operators import plain_name

if TYPE_CHECKING:
    from collections.abc import Callable

_BINDINGS = (torch._C._VariableFunctions, torch._C._nn)


class _DispatchedCalls(TorchDispatchMode):  # type: ignore[misc]
    """Notes what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def quickest_call(operator: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """What to call from now on with arguments like these, and what it returned for them."""
    binding = _binding(operator)
    if binding is not None:
        try:
            with _DispatchedCalls() as seen:
                result = binding(*args, **kwargs)
        except (TypeError, ValueError, RuntimeError):  # it takes other arguments
            return operator._op, operator(*args, **kwargs)
        if len(seen.calls) == 1 and _is_same((operator, args, kwargs), seen.calls[0]):
            return binding, result
    return operator._op, operator(*args, **kwargs)


def _binding(operator: Any) -> Callable[..., Any] | None:
    name = plain_name(operator)
    if operator.namespace != "aten" or name.endswith("_"):
        return None
    found = (getattr(module, name, None) for module in _BINDINGS)
    return next((binding for binding in found if binding is not None), None)


def _is_same(one: Any, other: Any) -> bool:
    """Tensors are compared by identity."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    return type(one) is type(other) and bool(one == other)
