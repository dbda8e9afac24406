"""Which values a model's attributes may have for one template to stand for all models.

A template's copy of an attribute is right if all that belongs to the value is copied with it.
Functions that refer to a model from outside of their arguments, iterators, generators of random
numbers and the like cannot be copied so: a module whose code asks for one computes alone.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import logging
import pathlib
import re
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from stepscope.fix.fuse.differences import ModelComparison
from stepscope.fix.fuse.stacked import Stacked

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type(...), enum.Enum, type,
    ModuleType, pathlib.PurePath, re.Pattern, logging.Logger, datetime.date, datetime.timedelta,
    decimal.Decimal, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    torch.finfo, torch.iinfo,
)  # fmt: skip
_CONTAINERS = (list, tuple, dict, set, frozenset)
_WITH_CONTENTS = (collections.OrderedDict, collections.defaultdict)
_LARGEST_ARRAY = 1 << 16  # bytes that are compared in every step

Kind = TypeVar("Kind")


class KnownValues:
    """Of the attributes of one model's modules."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(module) for module in model.modules()}
        own = (*model.parameters(), *model.buffers())
        self._memory = {_memory_of(tensor) for tensor in own}

    def knows(self, value: Any) -> bool:
        return self._knows(value, set())

    def are_same(self, models: Sequence[nn.Module], values: Sequence[Any]) -> bool:
        return all(
            ModelComparison(models[0], model).are_same(values[0], value)
            for model, value in zip(models[1:], values[1:], strict=True)
        )

    def is_constant(self, value: Any) -> bool:
        """Whether nothing can change inside, and it belongs to no model."""
        if isinstance(value, _CONSTANTS):
            return True
        if isinstance(value, BuiltinFunctionType):
            return value.__self__ is None or isinstance(value.__self__, ModuleType | type)
        if isinstance(value, FunctionType):
            cells = [_cell(cell) for cell in value.__closure__ or ()]
            given = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            return not vars(value) and all(map(self._is_fixed, [*cells, *given]))
        return _is_operator_or_number(value)

    def _is_fixed(self, value: Any) -> bool:
        """A constant, or made of constants only."""
        if type(value) in (tuple, frozenset):
            return all(map(self._is_fixed, value))
        return self.is_constant(value)

    def _knows(self, value: Any, seen: set[int]) -> bool:
        if self.is_constant(value) or id(value) in seen:
            return True
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            return self._knows_tensor(value)
        if isinstance(value, nn.Module):
            return id(value) in self._modules
        if is_array(value):
            return bool(value.nbytes <= _LARGEST_ARRAY and value.dtype != object)
        if isinstance(value, FunctionType | BuiltinFunctionType):
            return False
        parts = _parts_of(value)
        return parts is not None and all(self._knows(part, seen) for part in parts)

    def _knows_tensor(self, value: torch.Tensor) -> bool:
        if isinstance(value, Stacked):
            return True
        plain = type(value) is torch.Tensor and value.layout is torch.strided
        return plain and not value.requires_grad and _memory_of(value) not in self._memory


def is_array(value: Any) -> bool:
    """Whether it is numpy's, which is not imported for this."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _is_operator_or_number(value: Any) -> bool:
    """torch's and numpy's own, which keep nothing."""
    kind = type(value)
    if kind.__module__ == "numpy" or kind.__module__.startswith("numpy.dtypes"):
        return kind.__name__ != "ndarray"
    return kind.__name__ in ("OpOverload", "OpOverloadPacket", "ScriptFunction")


def contents_of(value: Any, kind: type[Kind]) -> list[Kind]:
    """All objects of this kind in a known value."""
    found: list[Kind] = []
    seen: set[int] = set()

    def look(one: Any) -> None:
        if id(one) in seen:
            return
        seen.add(id(one))
        if isinstance(one, kind):
            found.append(one)
        elif not isinstance(one, (*_CONSTANTS, FunctionType, BuiltinFunctionType, nn.Module)):
            for part in _parts_of(one) or ():
                look(part)

    look(value)
    return found


def _parts_of(value: Any) -> list[Any] | None:
    """What it is made of; None: it may hide something."""
    kind = type(value)
    if isinstance(value, MethodType):
        return [value.__self__] if isinstance(value.__func__, FunctionType) else None
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values(), *vars(value).values()]
    builtins = [base for base in kind.__mro__ if not base.__flags__ & (1 << 9)]
    allowed = (object, *_CONTAINERS, *_WITH_CONTENTS)
    if any(base not in allowed for base in builtins):
        return None
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        return None
    parts = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, dict):
        return [*parts, *value.keys(), *value.values(), getattr(value, "default_factory", None)]
    if isinstance(value, list | tuple | set | frozenset):
        return [*parts, *value]
    return parts if hasattr(value, "__dict__") else None


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _memory_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):  # tensors without a storage
        return id(tensor)
