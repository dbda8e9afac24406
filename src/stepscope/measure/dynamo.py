"""Hides our frames from torch.compile.

Dynamo compiles every Python frame below a compiled function, ours included. Each of our calls that
it cannot trace would split the graph, and a split graph rounds differently. So all our frames are
marked to be skipped.
"""

from __future__ import annotations

import sys
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

from stepscope.measure.never_raise import never_raise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
