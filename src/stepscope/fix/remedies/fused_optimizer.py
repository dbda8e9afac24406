"""The optimizer's update as one kernel per group of parameters: fused=True."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.fix.constructors import set_arguments
from stepscope.fix.declaration import Effect, Fix

if TYPE_CHECKING:
    from stepscope.fix.building import Made
    from stepscope.fix.proposal import Proposal, Script
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import ScriptFacts

_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


def fits(facts: ScriptFacts, value: str) -> str | None:
    optimizers = facts.of_kind("optimizer")
    if not optimizers:
        return "no torch optimizer was built"
    able = [built for built in optimizers if "fused" in built.options]
    if not able:
        return f"{optimizers[0].type} has no fused form"
    if all(built.options.get("fused") for built in able):
        return "the optimizer is fused already"
    if any(built.options.get("differentiable") for built in able):
        return "a differentiable optimizer cannot be fused"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    tell = training.telling()

    def change(made: Made) -> None:
        if made.takes("fused") and not made.value("fused") and not made.value("differentiable"):
            made.arguments |= {"fused": True, "foreach": None}
            tell(f"{made.name}: fused=True")

    training.before_building("optimizer", change)


def patch(script: Script, value: str) -> Proposal:
    return set_arguments(script, "optimizer", {"fused": "True"}, only=_FUSED)


FIX = Fix(
    id="fused-optimizer",
    effect=Effect.ROUNDING,
    family="optimizer",
    fits=fits,
    apply=apply,
    patch=patch,
)
