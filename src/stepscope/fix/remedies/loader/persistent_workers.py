"""Workers of a DataLoader that outlive an epoch: persistent_workers=True.

They keep their copies of the dataset and go on with their random numbers. So what the script
changes in the dataset between epochs does not reach them, and from the second epoch on a dataset
that draws random numbers gets others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.fix.remedies.loader.data_loaders import (
    patch_loaders,
    set_for_workers,
    with_workers,
)
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess


def fits(facts: ScriptFacts, value: str) -> str | None:
    loaders = with_workers(facts)
    if isinstance(loaders, str):
        return loaders
    if all(built.options.get("persistent_workers") for built in loaders):
        return "the workers already persist"
    if all(built.begun < 2 for built in loaders):
        return "no second epoch began in these steps, so its gain cannot be measured"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    set_for_workers(training, "persistent_workers", True)


def patch(script: Script, value: str) -> Proposal:
    return patch_loaders(script, "persistent_workers", "True")


FIX = Fix(
    id="persistent-workers",
    effect=Effect.RANDOM,
    may_be=Effect.BIT_IDENTICAL,
    after=frozenset({"loader-workers"}),
    fits=fits,
    apply=apply,
    patch=patch,
)
