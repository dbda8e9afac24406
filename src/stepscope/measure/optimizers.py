"""Which optimizers step, and when: nested, with a closure, or interrupted by an exception."""

from __future__ import annotations

import os
import sys
import weakref
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from stepscope.measure.capture_gate import gate
from stepscope.measure.line_watch import running_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MOST_LINES = 16
_WRAPPER, _TORCHS = "wrapper", f"optim{os.sep}optimizer.py"  # torch's own, around every step


class Optimizers:
    """Notified in the training thread when an optimizer's step begins and ends."""

    def __init__(self) -> None:
        self.calls = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()
        self.lines: list[dict[str, Any]] = []  # where each was first called, for rank.json
        self._latest: Callable[[], Any] = lambda: None
        self._running: list[Any] = []  # inside each other

    @property
    def own_passes(self) -> bool:
        """Whether a backward pass now ends no step: a closure's belongs to its optimizer, and what
        a CUDA graph records does not train."""
        return bool(self._running) or gate.is_capturing

    def begins(self, optimizer: Any) -> bool:
        """True for an outermost step that trains."""
        self._running = _still_running(self._running)
        self._running.append(optimizer)
        if len(self._running) > 1:
            return False
        self.calls += 1
        if self._latest() is not optimizer:
            self._latest = weakref.ref(optimizer)
            if optimizer not in self.known and len(self.lines) < _MOST_LINES:
                self._keep_line(optimizer)
            self.known.add(optimizer)
        return not gate.is_capturing  # what a CUDA graph records does not train

    def _keep_line(self, optimizer: Any) -> None:
        line = running_line()
        if line is not None:
            self.lines.append({"optimizer": type(optimizer).__name__, **asdict(line)})

    def ends(self) -> bool:
        """True for an outermost step that trained."""
        if not self._running:
            return False
        self._running.pop()
        return not self._running and not gate.is_capturing


def trained_parameters(optimizers: Iterable[Any]) -> list[Any]:
    return [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def with_closure(args: Any, kwargs: Any, wrap: Callable[[Any], Any]) -> Any:
    """The arguments of an optimizer's step with its closure wrapped; None where there is none."""
    if len(args) > 1 and callable(args[1]):
        return (args[0], wrap(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": wrap(kwargs["closure"])}
    return None


def any_optimizer_created() -> bool:
    """Whether a torch optimizer was ever created: its constructor wraps its class's `step`."""
    module: Any = sys.modules.get("torch.optim.optimizer")
    if module is None:
        return False
    kinds = list(module.Optimizer.__subclasses__())
    while kinds:
        kind = kinds.pop()
        if "step" in vars(kind) and getattr(kind.step, "hooked", None):
            return True
        kinds += kind.__subclasses__()
    return False


def _still_running(optimizers: list[Any]) -> list[Any]:
    """Only optimizers on the stack: one whose step raised never reported its end."""
    if not optimizers:
        return optimizers
    running: list[Any] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _WRAPPER and frame.f_code.co_filename.endswith(_TORCHS):
            running.append(frame.f_locals.get("self"))
        frame = frame.f_back
    outer = {id(optimizer) for optimizer in running[1:]}  # the first is the one that begins now
    return [optimizer for optimizer in optimizers if id(optimizer) in outer]
