"""Run forward and loss under fp16 autocast, with a GradScaler."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.fix.python_source import Edit, PythonSource
from stepscope.fix.remedies.precision.autocast import (
    ask_trainer,
    enter_until_backward,
    why_not_autocast,
    wrap_forward,
)
from stepscope.records.script_facts import Frame, ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_events import Made
    from stepscope.fix.training_process import TrainingProcess

# A GradScaler for a script that has none: fp16 gradients would underflow without it.
#
# The loss is scaled when backward begins. Gradients are unscaled before they are clipped, at the
# latest when the optimizer steps; a step with infinite gradients is skipped.


class LossScaling:
    """For one optimizer. Once refused, the script trains on as if nothing had been injected."""

    def __init__(self, training: TrainingProcess) -> None:
        self.is_on = True
        self._tell, self._refuse = training.telling(), training.refusing()
        self._optimizer: Any = None
        self._scaler: Any = None
        self._building = False
        self._stepping = False
        self._scaled = False  # the gradients now are
        self._backward_ran = False  # since the last step
        training.after_building("scaler", self._scaler_built)
        training.after_building("optimizer", self._optimizer_built)
        training.before_backward(self._scale)
        training.before_clipping(self._unscale)
        training.before_step(self._before_any_step)

    def _give_up(self, why: str, *others: Any) -> None:
        """Gradients that are scaled now are unscaled by hand, those of `others` too."""
        self._refuse(why)
        self.is_on = False
        if self._scaled:
            scale = self._scaler.get_scale()
            for parameter in _parameters_of([self._optimizer, *others]):
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
            self._scaled = False

    def _scaler_built(self, _made: Made) -> None:
        if not self._building:
            self._give_up("the script has its own GradScaler")

    def _optimizer_built(self, made: Made) -> None:
        import torch

        if self._optimizer is not None:
            self._give_up("the script has several optimizers")
            return
        if any(p.dtype == torch.float16 for p in _parameters_of([made.object])):
            self._give_up("parameters are fp16, so their gradients cannot be unscaled")
            return
        self._optimizer = made.object
        original = made.object.step

        def step(_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._wants_step(args, kwargs):
                return self._step()
            return original(*args, **kwargs)

        made.object.step = MethodType(step, made.object)  # schedulers expect a method

    def _scale(self, outputs: Any) -> Any:
        if not self.is_on or self._optimizer is None:
            return None
        import torch

        if self._scaler is None:
            device = next(_parameters_of([self._optimizer])).device.type
            self._building = True
            self._scaler = torch.amp.GradScaler(device)
            self._building = False
            self._tell("the loss is scaled by a GradScaler")
        with torch.enable_grad():
            scaled = self._scaler.scale(outputs)
        self._scaled = self._backward_ran = True
        return scaled

    def _unscale(self) -> None:
        if self._scaled and self._has_gradients():
            self._scaler.unscale_(self._optimizer)
            self._scaled = False

    def _wants_step(self, args: Any, kwargs: Any) -> bool:
        """Whether this call of optimizer.step goes through the scaler."""
        if self._stepping or not self.is_on:
            return False
        if any(value is not None for value in (*args, *kwargs.values())):
            self._give_up("the optimizer computes the loss in a closure")
            return False
        return self._backward_ran and self._has_gradients()

    def _step(self) -> Any:
        self._stepping = True
        try:
            result = self._scaler.step(self._optimizer)
        finally:
            self._stepping = False
        self._scaler.update()
        self._scaled = self._backward_ran = False
        return result

    def _before_any_step(self, optimizer: Any) -> None:
        """An optimizer that is none of torch's was not seen when it was built."""
        if self.is_on and optimizer is not self._optimizer:
            self._give_up(f"{type(optimizer).__name__} steps, which is not torch's own", optimizer)

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in _parameters_of([self._optimizer]))


def _parameters_of(optimizers: Iterable[Any]) -> Any:
    """Each once."""
    groups = [group for one in optimizers if one is not None for group in one.param_groups]
    return iter({id(p): p for group in groups for p in group["params"]}.values())


# Forward and loss under fp16 autocast, with a GradScaler.

_BY_HAND = (
    "run forward and loss under fp16 autocast with a GradScaler: call "
    "scaler.scale(loss).backward() and scaler.step(optimizer), then scaler.update(). Before "
    "gradients are clipped, call scaler.unscale_(optimizer)"
)


class MethodCall(NamedTuple):
    """`receiver.method()` in the source."""

    call: ast.Call
    receiver: ast.expr


def fits(facts: ScriptFacts, value: str) -> str | None:
    if facts.device != "cuda":
        return "it needs a CUDA device"
    if facts.of_kind("scaler"):
        return "the script has its own GradScaler"
    if len(facts.of_kind("optimizer")) != 1:
        return f"it needs one torch optimizer, but the script has {len(facts.of_kind('optimizer'))}"
    if facts.closure:
        return "the optimizer computes the loss in a closure"
    if "float16" in facts.dtypes:
        return "parameters are fp16, so their gradients cannot be unscaled"
    if any(name.startswith(("FSDP", "FullySharded")) for name in facts.modules):
        return "sharded gradients need FSDP's own scaler"
    return why_not_autocast(facts)


def apply(training: TrainingProcess, value: str) -> None:
    scaling: list[LossScaling] = []
    enter_until_backward(training, "float16", lambda: scaling[0].is_on)
    scaling.append(LossScaling(training))  # after autocast: the scaled loss is outside of it


def patch(script: Script, value: str) -> Proposal:
    autocast = wrap_forward(script, "float16")
    scaling = _scaling_edits(script)
    if autocast.by_hand or scaling is None:
        return ask_trainer(script.facts, "fp16") or Proposal(by_hand=(_BY_HAND,))
    return autocast + Proposal(edits=scaling)


def _scaling_edits(script: Script) -> tuple[Edit, ...] | None:
    """None where a place was not found: half of it would train badly."""
    facts = script.facts
    found = script.source_of(facts.step[:1])
    backwards = [one.backward[:1] for one in facts.passes]
    if found is None or not all(f and f[0].file == found[1].file for f in backwards):
        return None
    source, frame = found
    name = "grad_scaler" if _uses(source, "scaler") else "scaler"
    step = _method_call(source, frame, "step")
    losses = [_method_call(source, frames[0], "backward") for frames in backwards]
    if step is None or not losses or any(call is None for call in losses):
        return None
    optimizer = source.segment(step.receiver)
    clip = list(_unscale_before_clipping(source, facts.clip, frame, name, optimizer))
    if facts.clip and not clip:
        return None
    statement = source.statement_at(frame.line, frame.ends)
    assert statement is not None
    scaler = f'{name} = torch.amp.GradScaler("{facts.device}")'
    return (
        *source.ensure_import("torch"),
        source.insert_after_imports(scaler),
        *(
            edit
            for call in losses
            if call is not None
            for edit in source.surround(call.receiver, f"{name}.scale(", ")")
        ),
        *clip,
        source.replace(step.call, f"{name}.step({optimizer})"),
        source.insert_after(statement, f"{name}.update()"),
    )


def _method_call(source: PythonSource, frame: Frame, method: str) -> MethodCall | None:
    """Without positional arguments, and a statement of its own."""
    statement = source.statement_at(frame.line, frame.ends)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.args:
        return None
    if call.func.attr != method or (method == "step" and call.keywords):
        return None
    return MethodCall(call, call.func.value)


def _unscale_before_clipping(
    source: PythonSource, clip: Sequence[Frame], step: Frame, name: str, optimizer: str
) -> Iterator[Edit]:
    """In the function that steps, where the optimizer has the same name."""
    for frame in clip:
        if (frame.file, frame.function) == (step.file, step.function):
            statement = source.statement_at(frame.line, frame.ends)
            if statement is not None and source.starts_line(statement):
                yield source.insert_before(statement, f"{name}.unscale_({optimizer})")
            return


def _uses(source: PythonSource, name: str) -> bool:
    return any(
        (isinstance(node, ast.Name) and node.id == name)
        or (isinstance(node, ast.arg) and node.arg == name)
        for node in ast.walk(source.tree)
    )


FIX = Fix(
    id="fp16",
    effect=Effect.RANDOM,  # dropout's kernels of 16 bits draw others
    may_be=Effect.ROUNDING,
    family="precision",
    after=frozenset({"compile"}),  # the host, which autocast costs more, no longer sets the pace
    fits=fits,
    apply=apply,
    patch=patch,
)
