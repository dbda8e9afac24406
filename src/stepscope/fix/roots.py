"""The modules that a script itself calls to train.

During the first backward passes every call of a module is looked at. From then on only the calls of
the roots are: the others cost nothing.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.fix.pass_events import PassEvents

    Before = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


_PASSES = 4  # a step of several models has as many


class Roots:
    """Attaches to torch only where somebody listens."""

    def __init__(self, surrounds: Callable[[Any], Any], passes: PassEvents) -> None:
        self._surrounds, self._passes = surrounds, passes
        self._found_actions: list[Callable[[Any], None]] = []
        self._before: list[Before] = []
        self._roots: WeakSet[Any] = WeakSet()
        self._classes: set[type] = set()
        self._looking = False
        self._over = False
        self._left = _PASSES
        self._depth = 0

    @property
    def is_running(self) -> bool:
        """Whether a root's forward is under way."""
        return self._depth > 0

    def when_found(self, act: Callable[[Any], None]) -> None:
        self._look()
        self._found_actions.append(act)

    def before_call(self, before: Before | None) -> None:
        self._look()
        if before is not None:
            self._before.append(before)

    def _look(self) -> None:
        """Look at every module's call until a few backward passes are over."""
        if self._looking or self._over:
            return
        self._looking = True
        import torch

        module = torch.nn.Module
        self._plain = original = module.__call__
        is_grad_enabled = torch.is_grad_enabled

        @self._surrounds
        @functools.wraps(original)
        def call(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth or not is_grad_enabled() or not _has_parameters(self_):
                return original(self_, *args, **kwargs)
            self._meet(self_)
            args, kwargs = self._prepare(self_, args, kwargs)
            self._depth += 1
            try:
                return original(self_, *args, **kwargs)
            finally:
                self._depth -= 1

        module.__call__ = call
        _know_as_unpatched(original, call)
        self._passes.after(self._pass_ended)

    def _pass_ended(self) -> None:
        self._left -= 1
        if self._looking and self._left <= 0:
            import torch

            self._looking, self._over = False, True
            looking = torch.nn.Module.__call__
            torch.nn.Module.__call__ = self._plain
            _know_as_unpatched(looking, self._plain)
            for root in self._roots:
                self._watch_class(type(root))

    def _meet(self, module: Any) -> None:
        if module in self._roots:
            return
        self._roots.add(module)
        for act in self._found_actions:
            act(module)

    def _prepare(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for before in self._before:
            changed = before(module, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        return args, kwargs

    def _watch_class(self, owner: Any) -> None:
        """The roots' own class calls `before`; what it calls inside is not looked at."""
        if owner in self._classes or not self._before:
            return
        self._classes.add(owner)
        original = owner.__call__

        import torch

        is_grad_enabled = torch.is_grad_enabled

        @self._surrounds
        @functools.wraps(original)
        def call(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth or self_ not in self._roots or not is_grad_enabled():
                return original(self_, *args, **kwargs)
            args, kwargs = self._prepare(self_, args, kwargs)
            self._depth += 1
            try:
                return original(self_, *args, **kwargs)
            finally:
                self._depth -= 1

        owner.__call__ = call


def _has_parameters(module: Any) -> bool:
    return next(module.parameters(), None) is not None


def _know_as_unpatched(original: Any, replacement: Any) -> None:
    """torch.compile goes straight to a module's forward as long as its call is the one that it
    found when it was imported."""
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        module: Any = sys.modules.get(name)
        if getattr(module, "unpatched_nn_module_call", None) is original:
            module.unpatched_nn_module_call = replacement
