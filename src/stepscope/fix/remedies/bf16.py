"""Forward and loss under bf16 autocast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.fix.autocast import enter_until_backward, why_not_autocast, wrap_forward
from stepscope.fix.declaration import Effect, Fix

if TYPE_CHECKING:
    from stepscope.fix.proposal import Proposal, Script
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import ScriptFacts


def fits(facts: ScriptFacts, value: str) -> str | None:
    return why_not_autocast(facts)


def apply(training: TrainingProcess, value: str) -> None:
    enter_until_backward(training, "bfloat16")


def patch(script: Script, value: str) -> Proposal:
    return wrap_forward(script, "bfloat16")


FIX = Fix(
    id="bf16", effect=Effect.ROUNDING, family="precision", fits=fits, apply=apply, patch=patch
)
