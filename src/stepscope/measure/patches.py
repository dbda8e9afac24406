"""Change functions of torch and Python, and take every change back; hide our frames from
torch.compile and our operators from the script's modes. Nothing here may change a result.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, TypeVar

from stepscope.measure.never_raise import never_raise, note

Undo = Callable[[], object]
Action = Callable[[Any], None]

# What we have changed in torch and in Python, so that it can be taken back in a living process.
#
# A training command ends with its process. A notebook's kernel lives on: each captured cell would
# leave another layer around torch's functions.

_layer: list[Undo] = []  # of the capture that attaches now


def replace(owner: Any, name: str, replacement: Any) -> None:
    """Set an attribute; detaching restores it."""
    when_detached(replace_until(owner, name, replacement))


def replace_until(owner: Any, name: str, replacement: Any) -> Undo:
    """Set an attribute; what is returned restores it unless somebody else has replaced it since."""
    own = vars(owner)
    inherited, original = name not in own, own.get(name)
    setattr(owner, name, replacement)

    def restore() -> None:
        if vars(owner).get(name) is not replacement:
            return
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    return restore


class LeftAlone:
    """A replacement that takes turns with what it replaces, unless somebody else has replaced it
    since."""

    def __init__(self, owner: Any, name: str, original: Any, replacement: Any) -> None:
        self._owner, self._name = owner, name
        self._original, self._replacement = original, replacement

    def leave(self) -> None:
        self._put(self._original, self._replacement)

    def come_back(self) -> None:
        self._put(self._replacement, self._original)

    def _put(self, function: Any, instead_of: Any) -> None:
        if vars(self._owner).get(self._name) is instead_of:
            setattr(self._owner, self._name, function)


def wrap(owner: Any, name: str, replacement: Any) -> None:
    """Replace a function by one that calls it, until detached; see `surrounds`."""
    replace(owner, name, surrounds(functools.update_wrapper(replacement, getattr(owner, name))))


def when_detached(undo: Undo) -> None:
    _layer.append(undo)


@contextlib.contextmanager
def attaching() -> Iterator[list[Undo]]:
    """Collect what is attached inside, for `detach`."""
    layer: list[Undo] = []
    with _attaching_to(layer):
        yield layer


def detach(layer: list[Undo]) -> None:
    """Take everything back, the latest first."""
    while layer:
        undo = layer.pop()
        try:
            undo()
        except Exception as error:
            note("detaching", error)


def attaching_later(action: Callable[[Any], None]) -> Callable[[Any], None]:
    """What the action attaches, whenever it runs, belongs to the capture that attaches now."""
    layer = _layer

    def act(argument: Any) -> None:
        with _attaching_to(layer):
            action(argument)

    return act


@contextlib.contextmanager
def _attaching_to(layer: list[Undo]) -> Iterator[None]:
    global _layer
    before, _layer = _layer, layer
    try:
        yield
    finally:
        _layer = before


# Act right after a module is imported, whoever imports it, however lazily.
#
# Many libraries call `importlib.util.find_spec("torch")` only to learn whether torch is installed.
# So the finder stays in place, and the action waits until the module's code has run.

_actions: dict[str, list[Action]] = {}


def when_imported(name: str, action: Action) -> None:
    """Run action(module) now if the module is loaded, else each time its code has run.

    A module that imports torch first is being loaded while torch's own action runs. Its loader acts
    afterwards if it was expected when its import began.
    """
    module = sys.modules.get(name)
    is_loading = getattr(getattr(module, "__spec__", None), "_initializing", False)
    if module is not None and not is_loading:
        _run([action], name, module)
        return
    action = attaching_later(action)
    _actions.setdefault(name, []).append(action)
    when_detached(lambda: _actions[name].remove(action))
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def expect(name: str) -> None:
    """Actions for this module will be given later, perhaps while it is being loaded."""
    when_imported(name, lambda _module: None)


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
            # Patch the spec's own loader, which may never be used; nothing else changes.
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


# Hides our frames from torch.compile.
#
# Dynamo compiles every Python frame below a compiled function, ours included. Each of our calls
# that it cannot trace would split the graph, and a split graph rounds differently. So all our
# frames are marked to be skipped.

F = TypeVar("F", bound="Callable[..., Any]")
_OURS = "stepscope.measure"
_UNPATCHED = "unpatched_nn_module_call_impl"


@never_raise
def skip_our_frames() -> None:
    """Compile neither our functions nor what they call. Call once torch is imported."""
    for code in _our_codes():
        _skip(code, calls_too=True)


def surrounds(replacement: F) -> F:
    """Mark a function that wraps a call of the training's, which may be compiled."""
    _surround(replacement)
    return replacement


def untraced(hook: F) -> F:
    """Mark a hook that torch calls: dynamo traces an empty function instead.

    `is_compiling` in the hook would do almost that, but a frame that calls it is always compiled,
    even if it does nothing else.
    """
    hook._torchdynamo_inline = _empty  # type: ignore[attr-defined]
    return hook


def _empty(*_args: Any, **_kwargs: Any) -> None:
    return None


@never_raise
def know_as_unpatched(original: Any, replacement: Any) -> None:
    """Dynamo has a fast path for modules as long as their call is not patched.

    The call it finds when it is imported counts as unpatched: nothing to do before that.
    """
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        module: Any = sys.modules.get(name)
        if getattr(module, _UNPATCHED, None) is original:
            setattr(module, _UNPATCHED, replacement)


def is_tracing() -> bool:
    """Whether torch.compile is tracing the training's code: nothing trains then."""
    guards = sys.modules.get("torch._guards")
    return guards is not None and guards.TracingContext.try_get() is not None


def has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return False
    codes = getattr(sys.modules.get("torch._dynamo.convert_frame"), "input_codes", None)
    seen = getattr(codes, "seen", ())
    return bool(len(seen) or sum(dynamo.utils.counters["frames"].values()))


@never_raise
def _surround(replacement: Any) -> None:
    _skip(replacement.__code__, calls_too=False)


def _skip(code: CodeType, *, calls_too: bool) -> None:
    import torch

    eval_frame: Any = torch._C._dynamo.eval_frame  # no module to import before 2.6
    action = getattr(eval_frame, "_FrameAction", None)
    if action is None:  # torch before 2.7 passes over single frames only
        eval_frame.skip_code(code)
        return
    below = action.SKIP if calls_too else action.DEFAULT
    strategy = eval_frame._FrameExecStrategy(action.SKIP, below)
    eval_frame.set_code_exec_strategy(code, strategy)


def _our_codes() -> set[CodeType]:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(_OURS)]
    files = {getattr(module, "__file__", None) for module in modules}
    return {
        code for module in modules for code in _codes(vars(module)) if code.co_filename in files
    }


def _codes(names: Any) -> Iterator[CodeType]:
    """The code of all functions, methods and properties, with the functions inside them."""
    for value in list(names.values()):
        if isinstance(value, type):
            if value.__module__.startswith(_OURS):
                yield from _codes(vars(value))
            continue
        for function in (value, *(getattr(value, name, None) for name in _WRAPPED)):
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType):
                yield from _with_inner(code)


_WRAPPED = ("fget", "fset", "__func__", "__wrapped__")


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


# Our own work on tensors, out of sight of the script's modes: a counter of FLOPs, a log.


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Inside, operators go to no TorchDispatchMode and no TorchFunctionMode."""
    torch: Any = sys.modules["torch"]
    if not torch._C._len_torch_dispatch_stack() and not torch._C._len_torch_function_stack():
        yield
        return
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield
