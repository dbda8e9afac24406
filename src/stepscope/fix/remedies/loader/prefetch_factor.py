"""Each worker of a DataLoader loads more batches ahead: prefetch_factor (torch's default is 2)."""

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
    if all(built.options.get("prefetch_factor") == int(value) for built in loaders):
        return f"each worker loads {value} batches ahead already"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    set_for_workers(training, "prefetch_factor", int(value))


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
