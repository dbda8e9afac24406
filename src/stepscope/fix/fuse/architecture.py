"""Whether models are of one architecture, in which settings and values they may differ, and
the template whose code computes for all.
"""

from __future__ import annotations

import collections
import copy
import datetime
import decimal
import enum
import logging
import pathlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from stepscope.errors import UsageError
from stepscope.fix.fuse.behaviours import own_hooks
from stepscope.fix.fuse.rules.layers import PerModel, PerModelShare
from stepscope.fix.fuse.stacked import NotFusableError, Stacked


def check_given(models: Sequence[nn.Module]) -> None:
    """Raise a UsageError if there are no models, or one is there twice."""
    if not models:
        raise UsageError("fuse needs at least one model")
    if len({id(model) for model in models}) < len(models):
        raise UsageError("fuse needs distinct models, but one is given twice")


def check_alike(models: Sequence[nn.Module]) -> None:
    """Raise a UsageError with the first difference."""
    first, kinds = _tensors(models[0]), _kinds(models[0])
    for number, model in enumerate(models[1:], 1):
        tensors, others = _tensors(model), _kinds(model)
        for name in {**first, **tensors}:
            if first.get(name) != tensors.get(name):
                here, there = (_words(name, one.get(name)) for one in (first, tensors))
                raise UsageError(
                    f"model {number} is not built like model 0: {name} is {there}, not {here}"
                )
        for path in {**kinds, **others}:
            if kinds.get(path) is not others.get(path):
                here, there = (
                    f"a {one[path].__name__}" if path in one else "missing"
                    for one in (kinds, others)
                )
                raise UsageError(
                    f"model {number} is not built like model 0: "
                    f"{path or 'it'} is {there}, not {here}"
                )


def describe(model: nn.Module) -> tuple[Any, ...]:
    """Equal for models that can be in one array."""
    return tuple(_kinds(model).items()), tuple(_tensors(model).items())


def _kinds(model: nn.Module) -> dict[str, type]:
    """Classes by path; a parametrization makes a class for every module, which says nothing."""
    return {path: type_before_parametrizations(module) for path, module in model.named_modules()}


def _tensors(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return what must be the same in all models, and which earlier name is the same tensor."""
    first: dict[int, str] = {}
    found: dict[str, tuple[Any, ...]] = {}
    for kind in (model.named_parameters, model.named_buffers):
        for name, one in kind(remove_duplicate=False):
            tied = first.setdefault(id(one), name)
            found[name] = (tuple(one.shape), one.dtype, one.device, one.requires_grad, tied)
    return found


def _words(name: str, facts: tuple[Any, ...] | None) -> str:
    if facts is None:
        return "missing"
    shape, dtype, device, trains, tied = facts
    trained = "trained" if trains else "not trained (requires_grad=False)"
    tie = "" if tied == name else f", tied to {tied}"
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {device}, {trained}{tie}"


def check_lengths(count: int, **given: Sequence[Any]) -> None:
    """UsageError unless each is empty or has one value for each model."""
    for name, values in given.items():
        if values and len(values) != count:
            raise UsageError(f"{len(values)} {name} for {count} models: give one for each")


def place_of(model: int, count: int) -> int:
    """UsageError unless there is such a model; from the end, if it is negative."""
    if not -count <= model < count:
        raise UsageError(f"there is no model {model}: {count} models are fused")
    return model % count


def make_template(model: nn.Module, knows: Callable[[Any], bool]) -> nn.Module:
    """The model's code and settings without its tensors, which come from the stacks, without what
    cannot be copied, and without hooks, which each model's own modules call."""
    memo: dict[int, Any] = {id(one): one for one in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for name, value in vars(module).items():
            if name.endswith("_hooks") and name in NOT_SETTINGS:
                kept = {} if own_hooks(module) else value
                memo[id(value)] = type(value)(kept) if value is not None else None
            elif name not in NOT_SETTINGS and not knows(value):
                memo[id(value)] = value
            else:
                memo |= {id(one): one for one in contents_of(value, torch.Tensor)}
    with torch.no_grad():
        template = copy.deepcopy(model, memo)
    for module in template.modules():
        own: Any = vars(module).get("forward")
        if own is not None and getattr(own, "__self__", None) is not module:
            del module.forward  # that module computes alone
    return template


def refresh_kept_tensors(module: nn.Module) -> None:
    """Renew the tensors that a template's code made, equal for all models, and the list of weights
    that recurrent modules keep."""
    for name, value in vars(module).items():
        if isinstance(value, Stacked) and value.common is not None:
            vars(module)[name] = value.common
    if isinstance(module, nn.RNNBase):
        vars(module)["flatten_parameters"] = lambda: None  # cuDNN would want one model's memory
        names = module._flat_weights_names
        module._flat_weights = [module._parameters.get(name) for name in names]


def leave_stacks(model: nn.Module) -> None:
    """Give a model tensors of its own."""
    for one in (*model.parameters(), *model.buffers()):
        one.data = one.data.clone()


def put_windows(own: Sequence[torch.Tensor], stack: torch.Tensor) -> None:
    """Each model's tensor becomes a window, which counts its own changes as it would alone."""
    for one, window in zip(own, stack.detach().unbind(0), strict=True):
        one.data = window


# Settings in which models of one architecture differ, and what the template does about them.
#
# Dropout's share and an embedding's padding may differ. Any other attribute that differs is asked
# for as usual, and the module whose code asks for it then computes model by model. What no code
# asks for costs nothing.

_MAY_DIFFER: dict[str, tuple[tuple[type, ...], type[PerModel]]] = {
    "p": ((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), PerModel),
    "dropout": ((nn.RNNBase,), PerModelShare),
    "padding_idx": ((nn.Embedding, nn.EmbeddingBag), PerModel),
}
_OF_RECURRENT_MODULES = {"_flat_weights", "_flat_weight_refs", "_all_weights"}
MISSING = object()  # in place of an attribute that a model's module does not have
# What every module has, and behaviours.py looks at.
NOT_SETTINGS = {*vars(nn.Module()), "_compiled_call_impl", *_OF_RECURRENT_MODULES}


def settle(template: nn.Module, models: Sequence[nn.Module], knows: Callable[[Any], bool]) -> None:
    """Prepare the template for what differs from model to model, and for what is not known."""
    comparisons = [ModelComparison(models[0], other) for other in models[1:]]
    for path, _ in models[0].named_modules():
        own = [vars(one.get_submodule(path)) for one in models]
        for name in dict.fromkeys(name for one in own for name in one):
            if name in NOT_SETTINGS or name == "forward":
                continue
            values = tuple(one.get(name, MISSING) for one in own)
            pairs = zip(comparisons, values[1:], strict=True)
            alike = all(one.are_same(values[0], value) for one, value in pairs)
            if not (alike and knows(values[0])):
                put_difference(template.get_submodule(path), name, values)


def put_difference(module: nn.Module, name: str, values: tuple[Any, ...]) -> None:
    """Let a template's module know every model's value, if it can, else compute alone if asked."""
    kinds, holder = _MAY_DIFFER.get(name, ((), PerModel))
    if isinstance(module, kinds):
        setattr(module, name, holder(values))
    else:
        alike = len({id(value) for value in values}) == 1
        why = "is each model's own" if alike else "differs from model to model"
        # By a class of this module's own: Python asks the class before the module.
        vars(module).pop(name, None)
        kind = type(module)
        module.__class__ = type(kind.__name__, (kind,), {name: _Differs(name, why)})


class ModelComparison:
    """Compare what two models hold, to any depth."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        self._paths = {
            id(module): path for model in (one, other) for path, module in model.named_modules()
        }
        self._known: dict[tuple[int, int], bool] = {}

    def are_same(self, a: Any, b: Any) -> bool:
        if a is b:
            return True
        if isinstance(a, nn.Module):  # parts of the models are compared by themselves
            return bool(self._paths.get(id(a), "?") == self._paths.get(id(b), "!"))
        if type(a) is not type(b):
            return False
        if isinstance(a, torch.Tensor):
            return bool(a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
        pair = id(a), id(b)
        if pair not in self._known:
            self._known[pair] = True  # until shown otherwise: objects may hold each other
            self._known[pair] = self._have_same_parts(a, b)
        return self._known[pair]

    def _have_same_parts(self, a: Any, b: Any) -> bool:
        ours, theirs = _parts(a), _parts(b)
        if ours is None or theirs is None:
            # NaN equals NaN; what cannot say whether it is equal is not.
            try:
                answer = a == b
                same = answer if isinstance(answer, bool) else answer.all()
                return bool(same or (a != a and b != b))
            except Exception:
                return False
        return len(ours) == len(theirs) and all(map(self.are_same, ours, theirs))


def _parts(value: Any) -> list[Any] | None:
    """Return what a value is made of, in order; None: it has no parts."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, FunctionType):
        cells = (cell.cell_contents for cell in value.__closure__ or ())
        return [value.__code__, value.__defaults__, value.__kwdefaults__, *cells]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    compares = any("__eq__" in vars(kind) for kind in type(value).__mro__[:-1])
    if not compares and hasattr(value, "__dict__"):
        return [*vars(value).keys(), *vars(value).values()]
    return None


class _Differs:
    """An attribute that has another value in each model, until the template's own code sets it."""

    def __init__(self, name: str, why: str) -> None:
        self._name, self._why = name, why

    def __get__(self, module: Any, owner: type) -> Any:
        if module is None:
            return self
        if self._name not in vars(module):
            raise NotFusableError(f"{self._name} {self._why}")
        return vars(module)[self._name]

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self._name] = value


# Which values a model's attributes may have for one template to stand for all models.
#
# A template's copy of an attribute is right if all that belongs to the value is copied with it.
# Functions that refer to a model from outside of their arguments, iterators, generators of random
# numbers and the like cannot be copied so: a module whose code asks for one computes alone.

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
    """Tell which attributes of one model's modules a template can copy."""

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
        # torch's and numpy's own, which keep nothing.
        kind = type(value)
        if kind.__module__ == "numpy" or kind.__module__.startswith("numpy.dtypes"):
            return kind.__name__ != "ndarray"
        return kind.__name__ in ("OpOverload", "OpOverloadPacket", "ScriptFunction")

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
            if isinstance(value, Stacked):
                return True
            plain = type(value) is torch.Tensor and value.layout is torch.strided
            return plain and not value.requires_grad and _memory_of(value) not in self._memory
        if isinstance(value, nn.Module):
            return id(value) in self._modules
        if is_array(value):
            return bool(value.nbytes <= _LARGEST_ARRAY and value.dtype != object)
        if isinstance(value, FunctionType | BuiltinFunctionType):
            return False
        parts = _parts_of(value)
        return parts is not None and all(self._knows(part, seen) for part in parts)


def is_array(value: Any) -> bool:
    """Whether it is numpy's, which is not imported for this."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


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
    """Return what a value is made of; None: it may hide something."""
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
