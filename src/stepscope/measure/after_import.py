"""Act right after a module is imported, whoever imports it, however lazily.

Many libraries call `importlib.util.find_spec("torch")` only to learn whether torch is installed. So
the finder stays in place, and the action waits until the module's code has run.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from stepscope.measure.attached import attaching_later, when_detached
from stepscope.measure.never_raise import note

if TYPE_CHECKING:
    from collections.abc import Callable

    Action = Callable[[Any], None]

_actions: dict[str, list[Action]] = {}


def when_imported(name: str, action: Action) -> None:
    """Run action(module) now if the module is loaded, else each time its code has run.

    A module that imports torch first is being loaded while torch's own action runs. Its loader acts
    afterwards if it was expected when its import began.
    """
    if name in sys.modules and not _is_loading(sys.modules[name]):
        _run([action], name, sys.modules[name])
        return
    action = attaching_later(action)
    _actions.setdefault(name, []).append(action)
    when_detached(lambda: _actions[name].remove(action))
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def expect(name: str) -> None:
    """Actions for this module will be given later, perhaps while it is being loaded."""
    when_imported(name, lambda _module: None)


def _is_loading(module: Any) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _run(actions: list[Action], name: str, module: Any) -> None:
    for action in actions:
        try:
            action(module)
        except Exception as error:
            note(f"hooking {name}", error)


class _Finder:
    """Lets the other finders find a module, and its own loader load it."""

    def __init__(self) -> None:
        self._asking = threading.local()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _actions or getattr(self._asking, "name", None) == name:
            return None
        self._asking.name = name  # another finder may ask all finders, this one too
        try:
            spec = self._ask_others(name, path, target)
        finally:
            self._asking.name = None
        if spec is not None and hasattr(spec.loader, "exec_module"):
            _act_after(spec, name)
        return spec

    def _ask_others(self, name: str, path: Any, target: Any) -> Any:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                return spec
        return None


def _act_after(spec: Any, name: str) -> None:
    """Patch the spec's own loader, which may never be used; nothing else changes."""
    loader = spec.loader
    original = loader.exec_module

    def exec_module(module: Any) -> None:
        vars(loader).pop("exec_module", None)
        original(module)
        _run(_actions.get(name, []), name, module)

    try:
        loader.exec_module = exec_module
    except (AttributeError, TypeError) as error:
        note(f"hooking {name}", error)
