"""The optimizer's update as a few calls for all parameters: foreach=True.

It is torch's default on CUDA devices, but not on CPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script, set_arguments
from stepscope.records.script_facts import Built, ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_events import Made
    from stepscope.fix.training_process import TrainingProcess

# Optimizers of torch whose update has several forms: one tensor at a time, foreach, fused.

# Where `foreach` stands if it is given without its name; only Adagrad allows that.
POSITIONS = {"foreach": 6}


def why_not_switch(made: Made, form: str) -> str | None:
    """Why an optimizer that is about to be built cannot use this form of update."""
    if not made.takes(form):
        return f"{made.name} has no {form} form"
    if made.value("differentiable"):
        return f"{made.name} is differentiable, which needs one tensor at a time"
    if not str(type(made.object).step.__module__).startswith("torch.optim"):
        return f"{made.name} has its own update"
    return None


def why_none_switches(built: list[Built], form: str) -> str | None:
    """The same for a whole script, before anything is tried."""
    if not built:
        return "no torch optimizer was built"
    able = [one for one in built if form in one.options]
    if not able:
        return f"{built[0].type} has no {form} form"
    if all(one.options.get("fused") for one in able):
        return "the optimizer is fused already"
    if all(one.options.get("differentiable") for one in able):
        return "a differentiable optimizer updates one tensor at a time"
    return None


_BY_DEFAULT = ("cuda", "xpu", "mtia")  # devices on which torch chooses foreach itself
_TENSORS = ("lr", "betas")


def fits(facts: ScriptFacts, value: str) -> str | None:
    optimizers = facts.of_kind("optimizer")
    why = why_none_switches(optimizers, "foreach")
    if why is not None:
        return why
    able = [built for built in optimizers if _can_use_foreach(built)]
    if not able:
        return "the optimizer already uses foreach, or its learning rate is a tensor"
    if facts.device in _BY_DEFAULT and all(b.options["foreach"] is None for b in able):
        return f"torch already uses foreach on {facts.device}"
    return None


def _can_use_foreach(built: Built) -> bool:
    """Tensors as options need capturable=True, which CPUs do not have."""
    options = built.options
    has_tensors = any(options.get(name) == "<Tensor>" for name in _TENSORS)
    return (
        "foreach" in options
        and not (options["foreach"] or options.get("fused") or options.get("differentiable"))
        and (not has_tensors or bool(options.get("capturable")))
    )


def apply(training: TrainingProcess, value: str) -> None:
    import torch

    tell, leave_alone = training.telling(), training.leaving_alone()

    def change(made: Made) -> None:
        why = why_not_switch(made, "foreach")
        if why is None and made.value("fused"):
            why = f"{made.name} is fused"
        if why is None and isinstance(made.value("lr"), torch.Tensor):
            why = f"the learning rate of {made.name} is a tensor"
        if why is not None:
            leave_alone(why)
        elif not made.value("foreach"):
            made.arguments["foreach"] = True
            tell(f"{made.name}: foreach=True")

    training.before_building("optimizer", change)


def patch(script: Script, value: str) -> Proposal:
    return set_arguments(
        script, "optimizer", {"foreach": "True"}, where=_can_use_foreach, positions=POSITIONS
    )


FIX = Fix(
    id="foreach-optimizer",
    effect=Effect.ROUNDING,
    family="optimizer",
    fits=fits,
    apply=apply,
    patch=patch,
)
