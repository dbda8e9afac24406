"""One thread per operator: short operators wait longer for each other than they compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stepscope.fix.cores import keep_threads, patch_threads, variables_for, why_not_threads
from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess


def fits(facts: ScriptFacts, value: str) -> str | None:
    return why_not_threads(facts, 1)


def environment(value: str, variables: Mapping[str, str]) -> dict[str, str | None]:
    return variables_for(1, variables)


def apply(training: TrainingProcess, value: str) -> None:
    keep_threads(training, lambda: 1)


def patch(script: Script, value: str) -> Proposal:
    return patch_threads(script, 1)


FIX = Fix(
    id="one-thread",
    effect=Effect.ROUNDING,
    family="threads",
    fits=fits,
    apply=apply,
    environment=environment,
    patch=patch,
)
