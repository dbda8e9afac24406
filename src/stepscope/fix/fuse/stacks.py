"""The tensors of all models, stacked: what the template computes with, and the models' windows."""

from __future__ import annotations

from operator import is_not
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stepscope.errors import UsageError
from stepscope.fix.fuse.architecture import put_windows
from stepscope.fix.fuse.stacked import Stacked, is_capturing, is_ordinary, stack_in_place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Stacks:
    """Of one array."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        template: nn.Module,
        former: Stacks | None = None,
        in_place: bool = False,
    ) -> None:
        """`former`: stacks that stay, where they have as many models."""
        self.by_name: dict[str, torch.Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.windows: dict[str, tuple[torch.Tensor, Sequence[torch.Tensor]]] = {}
        self._buffers: list[_Buffers] = []
        self._count = len(models)
        made: dict[int, torch.Tensor] = {}
        for path, module in models[0].named_modules():
            same = [model.get_submodule(path) for model in models]
            placed = template.get_submodule(path)
            for kind in ("_parameters", "_buffers"):
                for name, first in getattr(module, kind).items():
                    if first is None:
                        continue
                    full = f"{path}.{name}".lstrip(".")
                    own = [getattr(one, kind)[name] for one in same]
                    if id(first) not in made:
                        stack = self._stack(full, own, former, in_place)
                        made[id(first)] = stack
                    self.by_name[full] = made[id(first)]
                    stacked = Stacked(made[id(first)], len(models))
                    if kind == "_parameters":
                        stacked._is_param = True
                    getattr(placed, kind)[name] = stacked
            self._buffers.append(_Buffers(path, placed, same))
        modules = [module for model in models for module in model.modules()]
        self._weights = [one._parameters for one in modules]
        self._held = [*self._weights, *(one._buffers for one in modules if one._buffers)]
        self._children = [one._modules for one in modules if one._modules]
        self._dicts = [held for one in modules for held in (one._buffers, one._modules)]
        self._expected = self._signature()

    def have_moved(self) -> bool:
        """Whether the models have other tensors or modules than before, or train others."""
        return self._signature() != self._expected

    def keep_replaced(self) -> bool:
        """Where the template's code assigned to a buffer, the models get it; whether it did."""
        found = False
        for one in self._buffers:
            if any(len(held) != len(before) for held, before in one.made):
                raise UsageError(
                    f"{one.path or 'the model'} creates a module or a weight in forward. "
                    "Create it in __init__, or call every model once before fuse"
                )
            if len(one.held) != len(one.stacked) or any(
                map(is_not, one.held.values(), one.stacked.values())
            ):
                found = True
                for name in list(one.held):
                    if one.held[name] is not one.stacked.get(name):
                        self._replace(one, name, one.held[name])
        if found:
            self._expected = self._signature()
        return found

    def forget_replaced(self, root: str) -> None:
        """What the template's code assigned below `root` before it failed."""
        for one in self._below(root):
            for held, before in ((one.held, one.stacked), *one.made):
                held.clear()
                held.update(before)

    def take_replaced(self, root: str) -> None:
        """Where models that computed alone assigned to buffers, the template gets them."""
        for one in self._below(root):
            for name in {name for own in one.own for name in own}:
                values = [own.get(name) for own in one.own]
                if any(map(is_not, values, one.windows.get(name, [None] * len(values)))):
                    self._take(one, name, values)
                    self._expected = self._signature()

    def take_moved(self, root: str) -> None:
        """Where models that computed alone gave a weight other data, the stack gets them."""
        begin = f"{root}.".replace(".", "/") if root else ""
        for name, (stack, own) in self.windows.items():
            if name.startswith(begin):
                for one, window in zip(own, stack.data.unbind(0), strict=True):
                    if one.data_ptr() != window.data_ptr():
                        window.copy_(one.data)
                        one.data = window

    def _below(self, root: str) -> Iterator[_Buffers]:
        for one in self._buffers:
            if not root or one.path == root or one.path.startswith(f"{root}."):
                yield one

    def _stack(
        self, full: str, own: Sequence[torch.Tensor], former: Stacks | None, in_place: bool
    ) -> torch.Tensor:
        trains, is_parameter = own[0].requires_grad, isinstance(own[0], nn.Parameter)
        old = former.by_name.get(full) if former is not None else None
        if old is not None and _fits(old, own):
            stack = old
            for window, one in zip(stack.detach().unbind(0), own, strict=True):
                if one.data_ptr() != window.data_ptr():
                    window.copy_(one.detach())
        else:
            values = [one.detach() for one in own]
            stack = stack_in_place(values) if in_place else torch.stack(values)
        if is_parameter:
            stack = stack if isinstance(stack, nn.Parameter) else nn.Parameter(stack, trains)
            stack.requires_grad_(trains)
            name = full.replace(".", "/")
            self.parameters[name], self.windows[name] = stack, (stack, own)
        put_windows(own, stack)
        return stack

    def _replace(self, one: _Buffers, name: str, new: Any) -> None:
        old = one.stacked.get(name)
        if not isinstance(new, torch.Tensor):
            self._set(one, name, None, new)
            return
        shared = not isinstance(new, Stacked) or new.common is not None
        values = new.front() if isinstance(new, Stacked) else new.expand(self._count, *new.shape)
        if not is_ordinary(values) or is_capturing():
            if not isinstance(old, Stacked) or old.physical.shape != values.shape:
                raise UsageError(
                    f"{one.path}.{name} is a buffer that forward replaces by one of another "
                    "shape. Compiled and captured steps cannot follow that"
                )
            one.held[name] = old  # those hold its memory
            with torch.no_grad():
                old.physical.copy_(values)
            return
        values = values.clone() if shared else values
        self._set(one, name, values, Stacked(values, self._count))

    def _take(self, one: _Buffers, name: str, values: list[Any]) -> None:
        if not all(isinstance(value, torch.Tensor) for value in values):
            if any(value is not None for value in values):
                raise UsageError(f"the models differ in whether they have the buffer {name}")
            self._set(one, name, None, None)
            return
        first = values[0]
        if any(value.shape != first.shape or value.dtype != first.dtype for value in values):
            raise UsageError(
                f"{one.path}.{name} is a buffer that has another shape in each model now. "
                "Buffers of fused models must keep the same shape"
            )
        stack = torch.stack(values)
        self._set(one, name, stack, Stacked(stack, self._count), values)

    def _set(
        self,
        one: _Buffers,
        name: str,
        stack: torch.Tensor | None,
        stacked: Any,
        own: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """New values of a buffer; what backward needs of the old ones stays as it is."""
        if stack is None:
            windows: list[Any] = [stacked] * self._count
            self.by_name.pop(one.full(name), None)
        else:
            held = stack.detach()
            windows = [value.data for value in own or held.unbind(0)]
            put_windows(windows, held)
            self.by_name[one.full(name)] = held
        one.held[name] = one.stacked[name] = stacked
        one.windows[name] = windows
        for buffers, window in zip(one.own, windows, strict=True):
            buffers[name] = window

    def _signature(self) -> tuple[list[Any], list[Any], list[int]]:
        """Asked in every step, of all models: of memory, not of objects, which costs less."""
        tensors = [one for held in self._held for one in held.values() if one is not None]
        trained = [
            one.requires_grad for held in self._weights for one in held.values() if one is not None
        ]
        children = [one for held in self._children for one in held.values()]
        content = [sum(map(len, self._dicts)), *map(id, children)]
        return [one.data_ptr() for one in tensors], trained, content


class _Buffers:
    """Those of one module of the template and of all models."""

    def __init__(self, path: str, module: nn.Module, same: Sequence[nn.Module]) -> None:
        self.path, self.held = path, module._buffers
        self.own: list[dict[str, Any]] = [one._buffers for one in same]
        self.stacked: dict[str, Any] = dict(self.held)
        self.windows = {name: [own[name] for own in self.own] for name in self.held}
        content: tuple[dict[str, Any], ...] = (module._modules, module._parameters)
        self.made = [(held, dict(held)) for held in content]

    def full(self, name: str) -> str:
        return f"{self.path}.{name}".lstrip(".")


def _fits(stack: torch.Tensor, own: Sequence[torch.Tensor]) -> bool:
    first = own[0]
    kind = stack.dtype == first.dtype and stack.device == first.device
    trained = isinstance(stack, nn.Parameter) == isinstance(first, nn.Parameter)
    return kind and trained and stack.shape == (len(own), *first.shape)
