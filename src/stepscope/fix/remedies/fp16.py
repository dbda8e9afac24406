"""Forward and loss under fp16 autocast, with a GradScaler."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from stepscope.fix.autocast import (
    ask_trainer,
    enter_until_backward,
    why_not_autocast,
    wrap_forward,
)
from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.loss_scaling import LossScaling
from stepscope.fix.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stepscope.fix.proposal import Script
    from stepscope.fix.python_source import Edit, PythonSource
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import Frame, ScriptFacts

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
