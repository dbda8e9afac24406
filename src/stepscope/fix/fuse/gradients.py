"""Gradients that reach a model's own weights, and the hooks that the user put on these.

A module that computes alone, a checkpoint that is computed again for backward, and a penalty on
`array[3].parameters()` give gradients to the model's windows. `fold` adds them to the stacks', so
that all gradients of the array lie there before it clips or steps.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


class WindowGradients:
    """Of one array."""

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
        """Of these stacks and their windows from now on."""
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
