"""Settings in which models of one architecture differ, and what the template does about them.

Dropout's share and an embedding's padding may differ. Any other attribute that differs is asked for
as usual, and the module whose code asks for it then computes model by model. What no code asks for
costs nothing.
"""

from __future__ import annotations

from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stepscope.fix.fuse.rules.dropout import PerModel, PerModelShare
from stepscope.fix.fuse.stacked import NotFusableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
    for path, name, values in differing_settings(models, knows):
        put_difference(template.get_submodule(path), name, values)


def put_difference(module: nn.Module, name: str, values: tuple[Any, ...]) -> None:
    """Let a template's module know every model's value, if it can, else compute alone if asked."""
    kinds, holder = _MAY_DIFFER.get(name, ((), PerModel))
    if isinstance(module, kinds):
        setattr(module, name, holder(values))
    else:
        alike = len({id(value) for value in values}) == 1
        why = "is each model's own" if alike else "differs from model to model"
        _raise_when_asked(module, name, why)


def differing_settings(
    models: Sequence[nn.Module], knows: Callable[[Any], bool]
) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Module, attribute and every model's value, where they differ or are not known."""
    compare = [ModelComparison(models[0], other) for other in models[1:]]
    for path, _ in models[0].named_modules():
        own = [vars(one.get_submodule(path)) for one in models]
        for name in dict.fromkeys(name for one in own for name in one):
            if name in NOT_SETTINGS or name == "forward":
                continue
            values = tuple(one.get(name, MISSING) for one in own)
            pairs = zip(compare, values[1:], strict=True)
            alike = all(one.are_same(values[0], value) for one, value in pairs)
            if not (alike and knows(values[0])):
                yield path, name, values


class ModelComparison:
    """Of what two models hold, to any depth."""

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
            return _are_equal(a, b)
        return len(ours) == len(theirs) and all(map(self.are_same, ours, theirs))


def _parts(value: Any) -> list[Any] | None:
    """What it is made of, in order; None: it has no parts."""
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


def _are_equal(a: Any, b: Any) -> bool:
    """NaN equals NaN; what cannot say whether it is equal is not."""
    try:
        answer = a == b
        same = answer if isinstance(answer, bool) else answer.all()
        return bool(same or (a != a and b != b))
    except Exception:
        return False


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


def _raise_when_asked(module: nn.Module, name: str, why: str) -> None:
    """By a class of this module's own: Python asks the class before the module."""
    vars(module).pop(name, None)
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: _Differs(name, why)})
