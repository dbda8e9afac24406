"""What a model's modules keep in Python: settings, counters, lists, tensors of earlier steps.

The template's code runs once for all models. What it changes in its own modules goes to every
model's (`to_models`); what the user, or a model that computes alone, changes in the models goes to
the template (`from_models`). Both are noticed by comparing identities, which costs little.
"""

from __future__ import annotations

import copy
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Sequence,
)
from operator import is_not, itemgetter
from typing import Any

import torch
from torch import nn

from stepscope.errors import UsageError
from stepscope.fix.fuse.architecture import (
    MISSING,
    NOT_SETTINGS,
    KnownValues,
    contents_of,
    is_array,
    put_difference,
)
from stepscope.fix.fuse.stacked import Stacked

_OF_TEMPLATE = {"forward", "flatten_parameters"}  # what fuse itself puts there


class PythonState:
    """Keep the models of one array and their template alike in Python."""

    def __init__(self, models: Sequence[nn.Module], template: nn.Module) -> None:
        self._models, self._known = models, KnownValues(models[0])
        self._modules = [
            _SameModule(path, module, [one.get_submodule(path) for one in models])
            for path, module in template.named_modules()
        ]
        self._own: Any = None  # what is compared in every step, of all models

    def from_models(self, root: str = "") -> bool:
        """Bring what changed in the models' modules below `root` to the template's."""
        if not root and not self._models_have_changed():
            return False
        found, looked = False, dict[int, Any]()
        for same in self._below(root):
            if any(one.has_changed(looked) for one in same.own):
                found = True
                self._settle_all(same, {name for one in same.own for name in one.changed()})
        return found

    def to_models(self) -> None:
        """Give every model what the template's code changed in its modules."""
        looked: dict[int, Any] = {}
        for same in self._modules:
            if not same.shared.has_changed(looked):
                continue
            for name in same.shared.changed():
                value = same.shared.values.get(name, MISSING)
                for model, one in enumerate(same.own):
                    if value is MISSING:
                        one.values.pop(name, None)
                    else:
                        old = one.values.get(name)
                        one.values[name] = self._of_model(same.path, value, model, old)
            self._accept(same)

    def check_keeps_nothing(self) -> None:
        """UsageError where compiled or captured code would keep something in Python only once."""
        looked: dict[int, Any] = {}
        if any(same.shared.has_changed(looked) for same in self._modules):
            raise UsageError(
                "the models' code keeps Python state in forward, which compiled and captured "
                "steps would update only once. If it is a cache, call the fused models once "
                "before. Else leave the step uncompiled"
            )

    def _models_have_changed(self) -> bool:
        """The same question for all at once, as it is asked in every step."""
        if self._own is None:
            own = [one for same in self._modules for one in same.own]
            self._own = (
                [(one.read, one.values) for one in own],
                [one.expected for one in own],
                [one.values for one in own],
                sum(len(one.values) for one in own),
                [one for one in own if one.contents],
            )
        reads, expected, values, size, inside = self._own
        try:
            if [read(held) for read, held in reads] != expected or sum(map(len, values)) != size:
                return True
        except (KeyError, RuntimeError, TypeError, ValueError):  # what cannot be compared is new
            return True
        looked: dict[int, Any] = {}
        return any(one.has_changed(looked) for one in inside)

    def forget(self, root: str) -> None:
        """Undo what the template's code changed below `root` before it failed."""
        looked: dict[int, Any] = {}
        for same in self._below(root):
            if same.shared.has_changed(looked):
                self._settle_all(same, same.shared.changed())

    def _accept(self, same: _SameModule) -> None:
        same.accept()
        self._own = None

    def _below(self, root: str) -> Iterator[_SameModule]:
        for same in self._modules:
            if not root or same.path == root or same.path.startswith(f"{root}."):
                yield same

    def _settle_all(self, same: _SameModule, names: Iterable[str]) -> None:
        """The template's value is that of all models, or one that no code may ask for."""
        for name in names:
            values = tuple(one.values.get(name, MISSING) for one in same.own)
            first = values[0]
            if name == "training" and any(value != first for value in values):
                raise UsageError(
                    f"{same.path or 'the model'} is in train mode in some fused models and in "
                    "eval mode in others. Call train() or eval() on that module of every model"
                )
            if all(value is MISSING for value in values):
                same.shared.values.pop(name, None)
            elif _can_be_stacked(values):
                same.shared.values[name] = Stacked(torch.stack(values), len(values))
            elif self._known.knows(first) and self._known.are_same(self._models, values):
                same.shared.values[name] = self._copied(first)
            else:
                put_difference(same.module, name, values)
        self._accept(same)

    def _copied(self, value: Any) -> Any:
        """A template's copy, which refers to the template's modules."""
        memo: dict[int, Any] = {id(tensor): tensor for tensor in contents_of(value, torch.Tensor)}
        ours = {id(module): path for path, module in self._models[0].named_modules()}
        places = {same.path: same.module for same in self._modules}
        for module in contents_of(value, nn.Module):
            memo[id(module)] = places.get(ours.get(id(module), "?"), module)
        return copy.deepcopy(value, memo)

    def _of_model(self, path: str, value: Any, model: int, old: Any) -> Any:
        """One model's part of what the template's code made; containers stay the model's own."""
        if isinstance(value, Stacked):
            return value.of(model)
        if isinstance(value, nn.Module):
            found = {id(same.module): same.path for same in self._modules}.get(id(value))
            if found is None:
                raise UsageError(
                    f"{path or 'the model'} creates a module in forward, and each model needs "
                    "its own. Create it in __init__, or call every model once before fuse"
                )
            return self._models[model].get_submodule(found)

        def part(one: Any, former: Any = None) -> Any:
            return self._of_model(path, one, model, former)

        made = _rebuilt(value, old if old is not value and type(old) is type(value) else None, part)
        if made is not None:
            return made
        if isinstance(value, torch.Tensor) or self._known.is_constant(value):
            return value
        if not self._known.knows(value):
            raise UsageError(
                f"{path or 'the model'} keeps a {type(value).__name__} that forward creates, "
                "and each model needs its own. Create it in __init__"
            )
        if callable(value) or not hasattr(value, "__dict__"):
            return copy.deepcopy(value)
        own = old if old is not value and type(old) is type(value) else copy.copy(value)
        parts = {key: part(one, vars(own).get(key)) for key, one in vars(value).items()}
        vars(own).clear()
        vars(own).update(parts)
        return own


def _rebuilt(value: Any, old: Any, part: Callable[..., Any]) -> Any:
    """A container with every part changed: the model's own `old`, if it has one. None: it is no
    container."""
    if isinstance(value, MutableMapping):
        made = {key: part(one) for key, one in value.items()}
        own = copy.copy(value) if old is None else old
        own.clear()
        own.update(made)
        return own
    if isinstance(value, MutableSequence):
        own = copy.copy(value) if old is None else old
        own[:] = [part(one) for one in value]
        return own
    if isinstance(value, MutableSet):
        return {part(one) for one in value}
    if type(value) is tuple:
        return tuple(part(one) for one in value)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(part, value))
    return None


class _SameModule:
    """One module of the template and those of all models."""

    def __init__(self, path: str, module: nn.Module, own: Sequence[nn.Module]) -> None:
        self.path, self.module = path, module
        self.shared = _Watched(vars(module))
        self.own = [_Watched(vars(one)) for one in own]

    def accept(self) -> None:
        self.shared.accept()
        for one in self.own:
            one.accept()


class _Watched:
    """One module's attributes, and what they were when last looked at."""

    __slots__ = ("contents", "expected", "names", "read", "size", "values")

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.accept()

    def accept(self) -> None:
        self.size = len(self.values)
        self.names = tuple(name for name in self.values if name not in _IGNORED)
        self.read = itemgetter("_modules", "training", *self.names)
        self.expected = self.read(self.values)
        looked: dict[int, Any] = {}
        self.contents = {
            name: _contents(self.values[name], looked)
            for name in self.names
            if _may_change_inside(self.values[name])
        }

    def has_changed(self, looked: dict[int, Any]) -> bool:
        values = self.values
        if len(values) != self.size:
            return True
        try:
            if any(map(is_not, self.read(values), self.expected)):
                return True
        except KeyError:
            return True
        return any(_contents(values[name], looked) != was for name, was in self.contents.items())

    def changed(self) -> list[str]:
        before = dict(zip(("_modules", "training", *self.names), self.expected, strict=True))
        found = [name for name, was in before.items() if self.values.get(name, MISSING) is not was]
        found += [name for name in self.values if name not in before and name not in _IGNORED]
        looked: dict[int, Any] = {}
        for name, was in self.contents.items():
            if name not in found and _contents(self.values[name], looked) != was:
                found.append(name)
        return found


_IGNORED = (NOT_SETTINGS | _OF_TEMPLATE) - {"training"} | {"training", "_modules"}


def _can_be_stacked(values: Sequence[Any]) -> bool:
    first = values[0]
    return all(isinstance(value, torch.Tensor) for value in values) and (
        any(value is not first for value in values)
        and all(value.shape == first.shape and value.dtype == first.dtype for value in values)
        and (first.requires_grad or any(not torch.equal(value, first) for value in values))
    )


def _may_change_inside(value: Any) -> bool:
    if isinstance(value, torch.Tensor | MutableMapping | MutableSequence | MutableSet):
        return True
    if isinstance(value, tuple):
        return any(map(_may_change_inside, value))
    if isinstance(value, nn.Module | type) or callable(value):
        return False
    return hasattr(value, "__dict__") or is_array(value)


def _contents(value: Any, looked: dict[int, Any]) -> Any:
    """Equal as long as nothing inside changes."""
    if isinstance(value, int | float | str | None):
        return value
    if id(value) in looked:
        return looked[id(value)]
    looked[id(value)] = id(value)  # objects may hold each other
    if isinstance(value, torch.Tensor):
        plain = value.physical if isinstance(value, Stacked) else value
        found: Any = (id(plain), 0 if plain.is_inference() else plain._version)
    elif isinstance(value, MutableMapping):
        found = tuple((key, _contents(one, looked)) for key, one in value.items())
    elif isinstance(value, MutableSequence | tuple):
        found = tuple(_contents(one, looked) for one in value)
    elif isinstance(value, MutableSet):
        found = frozenset(value)
    elif is_array(value):
        found = value.tobytes()
    elif isinstance(value, nn.Module | type) or callable(value) or not hasattr(value, "__dict__"):
        found = id(value)
    else:
        found = id(value), _contents(vars(value), looked)
    looked[id(value)] = found
    return found
