"""Each worker of a DataLoader loads more batches ahead: prefetch_factor (torch's default is 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.fix.built_objects import (
    NO_LOADER,
    patch_loaders,
    set_in_loaders,
    training_loaders,
    with_workers,
)
from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script

if TYPE_CHECKING:
    from stepscope.fix.training_events import Made
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import ScriptFacts


def fits(facts: ScriptFacts, value: str) -> str | None:
    if not training_loaders(facts):
        return NO_LOADER
    loaders = with_workers(facts)
    if not loaders:
        return "the DataLoader has no workers"
    if all(built.options.get("prefetch_factor") == int(value) for built in loaders):
        return f"each worker loads {value} batches ahead already"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    set_in_loaders(training, "prefetch_factor", int(value), _why_not)


def _why_not(made: Made) -> str | None:
    return None if made.value("num_workers") else f"{made.name} has no workers"


def patch(script: Script, value: str) -> Proposal:
    return patch_loaders(script, "prefetch_factor", value)


FIX = Fix(
    id="prefetch-factor",
    effect=Effect.BIT_IDENTICAL,
    values=("4", "8"),
    accepts=lambda value: value.isdecimal() and int(value) > 0,
    after=frozenset({"loader-workers"}),
    fits=fits,
    apply=apply,
    patch=patch,
)
