"""Optimizers of torch whose update has several forms: one tensor at a time, foreach, fused."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.fix.building import Made
    from stepscope.records.script_facts import Built

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
