"""The optimizer's update as one kernel per group of parameters: fused=True."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script, set_arguments
from stepscope.fix.remedies.optimizer.foreach_optimizer import (
    POSITIONS,
    why_none_switches,
    why_not_switch,
)
from stepscope.records.script_facts import Built, ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_events import Made
    from stepscope.fix.training_process import TrainingProcess

_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia")
_TRAINER = 'give TrainingArguments optim="adamw_torch_fused": the Trainer builds the optimizer'


def fits(facts: ScriptFacts, value: str) -> str | None:
    if facts.device not in _DEVICES:
        return f"torch has no fused optimizers for {facts.device}"
    return why_none_switches(facts.of_kind("optimizer"), "fused")


def apply(training: TrainingProcess, value: str) -> None:
    """The model may move to its device after the optimizer is built: so the parameters are looked
    at once they have gradients."""
    tell, refuse = training.telling(), training.refusing()
    leave_alone = training.leaving_alone()
    unchecked: WeakKeyDictionary[Any, bool | None] = WeakKeyDictionary()  # the script's foreach

    def change(made: Made) -> None:
        why = why_not_switch(made, "fused")
        if why is not None:
            leave_alone(why)
        elif not made.value("fused"):
            unchecked[made.object] = made.value("foreach")
            made.arguments |= {"fused": True, "foreach": None}
            tell(f"{made.name}: fused=True")

    def check() -> None:
        for optimizer, foreach in list(unchecked.items()):
            parameters = _with_gradients(optimizer)
            if not parameters:
                continue
            del unchecked[optimizer]
            why = why_not_fused(type(optimizer), parameters)
            if why is not None:
                _undo(optimizer, foreach)
                refuse(f"{type(optimizer).__name__}: {why}")

    training.before_building("optimizer", change)
    training.after_backward(check)


def _with_gradients(optimizer: Any) -> list[Any]:
    fused = [group for group in getattr(optimizer, "param_groups", ()) if group.get("fused")]
    return [p for group in fused for p in group["params"] if p.grad is not None]


def why_not_fused(kind: type[Any], parameters: list[Any]) -> str | None:
    """What torch would raise in the first step of this kind of optimizer."""
    from torch.utils import _foreach_utils

    devices = set(_foreach_utils._get_fused_kernels_supported_devices())
    devices -= {"cuda"} if _is_for_cpus_only(kind) else set()
    for parameter in parameters:
        if parameter.device.type not in devices:
            return f"torch has no fused update for parameters on {parameter.device.type}"
        if not parameter.is_floating_point():
            return f"torch has no fused update for {parameter.dtype}"
        if parameter.grad.is_sparse:
            return "torch has no fused update for sparse gradients"
    return None


def _is_for_cpus_only(kind: type[Any]) -> bool:
    """As Adagrad is before torch 2.13; only its own check of the parameters says so."""
    try:
        return "cuda_unsupported=True" in inspect.getsource(kind._init_group)
    except (AttributeError, OSError, TypeError):
        return False


def _undo(optimizer: Any, foreach: bool | None) -> None:
    for options in (optimizer.defaults, *optimizer.param_groups):
        options |= {"fused": None, "foreach": foreach}
    optimizer._step_supports_amp_scaling = False


def patch(script: Script, value: str) -> Proposal:
    proposal = set_arguments(
        script,
        "optimizer",
        {"fused": "True"},
        where=_can_be_fused,
        in_libraries={"transformers": _TRAINER},
    )
    # torch refuses both together
    return proposal + set_arguments(
        script,
        "optimizer",
        {"foreach": "None"},
        where=lambda built: _can_be_fused(built) and bool(built.options.get("foreach")),
        positions=POSITIONS,
        in_libraries={"transformers": _TRAINER},
    )


def _can_be_fused(built: Built) -> bool:
    options = built.options
    return "fused" in options and not options["fused"] and not options.get("differentiable")


FIX = Fix(
    id="fused-optimizer",
    effect=Effect.ROUNDING,
    family="optimizer",
    fits=fits,
    apply=apply,
    patch=patch,
)
