"""The tensors of all models, stacked: what the template computes with, the models' windows
onto it, and their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import is_not
from typing import Any
from weakref import ref

import torch
from torch import nn

from stepscope.errors import UsageError
from stepscope.fix.fuse.architecture import put_windows
from stepscope.fix.fuse.stacked import Stacked, is_capturing, is_ordinary, stack_in_place


class Stacks:
    """Hold the tensors of one array's models, stacked."""

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
        """Undo what the template's code assigned below `root` before it failed."""
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
        first, is_parameter = own[0], isinstance(own[0], nn.Parameter)
        stack = former.by_name.get(full) if former is not None else None
        if (
            stack is not None
            and isinstance(stack, nn.Parameter) == is_parameter
            and (stack.dtype, stack.device) == (first.dtype, first.device)
            and stack.shape == (len(own), *first.shape)
        ):
            for window, one in zip(stack.detach().unbind(0), own, strict=True):
                if one.data_ptr() != window.data_ptr():
                    window.copy_(one.detach())
        else:
            values = [one.detach() for one in own]
            stack = stack_in_place(values) if in_place else torch.stack(values)
        if is_parameter:
            trains = first.requires_grad
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
        """Set a buffer; what backward needs of the old values stays as it is."""
        full = f"{one.path}.{name}".lstrip(".")
        if stack is None:
            windows: list[Any] = [stacked] * self._count
            self.by_name.pop(full, None)
        else:
            held = stack.detach()
            windows = [value.data for value in own or held.unbind(0)]
            put_windows(windows, held)
            self.by_name[full] = held
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


# Gradients that reach a model's own weights, and the hooks that the user put on these.
#
# A module that computes alone, a checkpoint that is computed again for backward, and a penalty on
# `array[3].parameters()` give gradients to the model's windows. `fold` adds them to the stacks', so
# that all gradients of the array lie there before it clips or steps.


class WindowGradients:
    """Bring the gradients of one array's windows to its stacks."""

    def __init__(self) -> None:
        self._to_windows: set[tuple[int, int]] = set()  # a stack's id, a model
        self._waiting: dict[tuple[int, int], tuple[str, torch.Tensor, torch.Tensor]] = {}
        self._to_stacks: set[int] = set()
        self._handles: list[Any] = []
        self._windows: list[torch.Tensor] = []

    def clear(self) -> None:
        """There are no gradients any more."""
        for _, _, window in self._waiting.values():
            window.grad = None
        self._waiting.clear()
        self._to_windows.clear()
        self._to_stacks.clear()

    def follow(self, stacks: dict[str, tuple[torch.Tensor, Sequence[torch.Tensor]]]) -> None:
        """Hook these stacks and their windows from now on."""
        self.leave()
        self._windows = [window for _, own in stacks.values() for window in own]
        for name, (stack, windows) in stacks.items():
            if not stack.requires_grad:
                continue
            kept = ref(stack)
            arrived = partial(self._arrived, kept)
            self._handles.append(stack.register_post_accumulate_grad_hook(arrived))
            self._handles.append(stack.register_hook(partial(self._call, name, kept, windows)))
            for model, window in enumerate(windows):
                reached = partial(self._reached, name, kept, model)
                vars(reached)["of_fuse"] = True
                self._handles.append(window.register_post_accumulate_grad_hook(reached))

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def are_hooked(self) -> bool:
        return any(window._backward_hooks for window in self._windows)

    def left_out(self, stacks: dict[str, torch.Tensor]) -> dict[str, list[bool]]:
        """Stacks of which backward reached some models' weights only: True where not."""
        found: dict[str, list[bool]] = {}
        for name, stack in stacks.items():
            if stack.grad is None or id(stack) in self._to_stacks:
                continue
            missing = [(id(stack), model) not in self._to_windows for model in range(len(stack))]
            if any(missing) and not all(missing):
                found[name] = missing
        return found

    def _arrived(self, stack: Any, _: torch.Tensor) -> None:
        self._to_stacks.add(id(stack()))

    def _reached(self, name: str, kept: Any, model: int, window: torch.Tensor) -> None:
        stack = kept()
        if stack is not None:
            self._waiting[id(stack), model] = (name, stack, window)

    def fold(self) -> None:
        """Add what the models' own weights got to the stacks' gradients."""
        for (stack_id, model), (name, stack, window) in self._waiting.items():
            gradient, window.grad = window.grad, None
            if gradient is None:
                continue
            if window._backward_hooks and stack_id in self._to_stacks:
                raise _both_ways(name)
            with torch.no_grad():
                if stack.grad is None:
                    stack.grad = torch.zeros_like(stack)
                stack.grad[model] += gradient.detach()
            self._to_windows.add((stack_id, model))
        self._waiting.clear()

    def _call(
        self, name: str, stack: Any, windows: Sequence[torch.Tensor], gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """Call every model's hooks on the weight with its own part of the gradient."""
        if not any(window._backward_hooks for window in windows):
            return None
        own = list(gradient.unbind(0))
        for model, window in enumerate(windows):
            for hook in list((window._backward_hooks or {}).values()):
                if {(id(stack()), model)} & (self._to_windows | self._waiting.keys()):
                    raise _both_ways(name)
                changed = hook(own[model])
                own[model] = own[model] if changed is None else changed
        return torch.stack(own)


def _both_ways(name: str) -> UsageError:
    return UsageError(
        f"{name} has a hook that would get two parts of one gradient. Some modules compute "
        "together and some model by model (array.report()['one_by_one']). Change the "
        "gradient between array.backward and array.step instead"
    )
