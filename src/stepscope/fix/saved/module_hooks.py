"""Hooks on inner modules: on those that plans ask about now, and on no others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class ModuleHooks:
    """Torch calls a module without hooks in less time: what earlier plans needed is taken away."""

    def __init__(self, enters: Callable[..., None], leaves: Callable[..., None]) -> None:
        self._enters = enters
        self._leaves = leaves
        self._on_entry: dict[torch.nn.Module, Any] = {}
        self._on_exit: dict[torch.nn.Module, Any] = {}

    def keep_on(self, entered: set[torch.nn.Module], left: set[torch.nn.Module]) -> None:
        """Whether `enters` and `leaves` are called for a module."""
        for unneeded in self._on_entry.keys() - entered:
            self._on_entry.pop(unneeded).remove()
        for unneeded in self._on_exit.keys() - left:
            self._on_exit.pop(unneeded).remove()
        for module in entered - self._on_entry.keys():
            handle = module.register_forward_pre_hook(self._enters, prepend=True)
            self._on_entry[module] = handle
        for module in left - self._on_exit.keys():
            handle = module.register_forward_hook(self._leaves, always_call=True)
            self._on_exit[module] = handle
