"""Which optimizers step and when, and the steps of a training without a torch optimizer,
found by its backward passes.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from stepscope.measure.cuda_graphs import gate
from stepscope.measure.patches import has_compiled, unseen
from stepscope.measure.source_lines import running_line

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
        self.nest = False  # steps call steps: of another optimizer, or of their base class

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
            self.nest = True
            return False
        self.calls += 1
        if self._latest() is not optimizer:
            self._latest = weakref.ref(optimizer)
            if optimizer not in self.known and len(self.lines) < _MOST_LINES:
                line = running_line()
                if line is not None:
                    self.lines.append({"optimizer": type(optimizer).__name__, **asdict(line)})
            self.known.add(optimizer)
        return not gate.is_capturing  # what a CUDA graph records does not train

    def resume(self) -> None:
        """Beginnings were not told for a while: those on the stack are in their steps."""
        self._running = _on_stack()[::-1]

    def look_for_nests(self) -> bool:
        """In a step that is about to end: whether it was called by another one."""
        self.nest = self.nest or len(_on_stack()) > 1
        return self.nest

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
    outer = {id(optimizer) for optimizer in _on_stack()[1:]}  # the first is the one that begins now
    return [optimizer for optimizer in optimizers if id(optimizer) in outer]


def _on_stack() -> list[Any]:
    """Optimizers that are in their steps, the innermost first."""
    running: list[Any] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _WRAPPER and frame.f_code.co_filename.endswith(_TORCHS):
            running.append(frame.f_locals.get("self"))
        frame = frame.f_back
    return running


# Steps of a training without a torch optimizer, derived from its backward passes.
#
# A script that updates its parameters by hand resets their gradients once a step. So a pass that
# finds the gradients reset is the first of a step; passes that add to them belong to the same step.

# On a device, gradients zeroed through `.data` leave no mark that can be read without a
# synchronisation: after this many passes, count each as a step.
_MOST_PASSES = 8
# When a torch optimizer exists, this many resets of the gradients show that it never steps. One is
# enough when compiled code has updated the parameters: hooks do not see an optimizer in there.
_PATIENCE = 3
_FARTHEST = 10_000  # nodes of the graph


class Passes:
    """Asked at the beginning and the end of every outermost backward pass."""

    def __init__(self) -> None:
        self.ends_steps = False  # decided: passes, not optimizers, end steps
        self._per_step = 0  # passes of a step, once known
        self._since = 0  # passes since the last step ended
        self._resets = 0
        self._parameter: Callable[[], Any] = lambda: None
        self._gradient: Callable[[], Any] = lambda: None
        self._version = -1
        self._updates = -1  # the parameter's version
        self._sum: float | None = None

    def begins(self, roots: Any, *, optimizer_exists: bool) -> bool:
        """Whether a step ended unnoticed before this pass."""
        over = self._since > 0 and self._were_reset()
        if self._parameter() is None:
            self._parameter = _some_parameter(roots)
        if not over:
            return False
        self._resets += 1
        if not self.ends_steps and optimizer_exists and not self._is_certain():
            self._since = 0
            return False
        self.ends_steps = True
        self._per_step, self._since = self._since, 0
        return True

    def ends(self, *, optimizer_exists: bool) -> bool:
        """Whether a step ends with this pass."""
        self._since += 1
        self._remember_gradient()
        if not self._per_step and self._since >= _MOST_PASSES and not optimizer_exists:
            self.ends_steps, self._per_step = True, 1
        over = bool(self._per_step) and self._since >= self._per_step
        if over:
            self._since = 0
        return over

    @property
    def ended_step(self) -> bool:
        """Whether the last pass ended a step. An optimizer that steps now, for the first time,
        belongs to that step: the script ran passes before it trained."""
        return self.ends_steps and not self._since

    @property
    def is_amid_step(self) -> bool:
        """Whether passes have ended since the last step did."""
        return self._since > 0

    def _is_certain(self) -> bool:
        parameter = self._parameter()
        updated = parameter is not None and parameter._version != self._updates
        return self._resets >= _PATIENCE or (updated and has_compiled())

    def _were_reset(self) -> bool:
        parameter, gradient = self._parameter(), self._gradient()
        if parameter is None:
            return True
        now = parameter.grad
        if now is None or now is not gradient or now._version != self._version:
            return True
        return _sum_on_cpu(now) != self._sum

    def _remember_gradient(self) -> None:
        parameter = self._parameter()
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            self._parameter = lambda: None  # this pass did not reach it: look for another
            return
        self._gradient, self._version = weakref.ref(gradient), gradient._version
        self._updates = parameter._version
        self._sum = None if self._per_step == 1 else _sum_on_cpu(gradient)


def _sum_on_cpu(gradient: Any) -> float | None:
    """Changes when a gradient is zeroed through `.data`; read until a step's passes are known."""
    try:
        with unseen():
            return float(gradient.detach().abs().sum()) if gradient.device.type == "cpu" else None
    except Exception:
        return None


def _some_parameter(roots: Any) -> Callable[[], Any]:
    """A leaf that these tensors' gradients flow into; a parameter rather than an input."""
    leaf: Any = None
    for candidate in _leaves(roots):
        leaf = candidate
        if type(candidate).__name__ == "Parameter":
            break
    return weakref.ref(leaf) if leaf is not None else lambda: None


def _leaves(roots: Any) -> Iterable[Any]:
    tensors = roots if isinstance(roots, (list, tuple)) else [roots]
    stack = [node for tensor in tensors if (node := getattr(tensor, "grad_fn", None)) is not None]
    seen: set[Any] = set()
    while stack and len(seen) < _FARTHEST:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)


def what_ends_steps(step_on: str, passes: Passes | None) -> str:
    """What ended this rank's steps, as `--step-on` names it."""
    if step_on != "auto":
        return step_on
    return "backward" if passes is not None and passes.ends_steps else "optimizer"
