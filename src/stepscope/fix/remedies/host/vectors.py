"""The widest vectors that the processor has, where ATEN_CPU_CAPABILITY asks for narrower ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess

_NAME = "ATEN_CPU_CAPABILITY"


def fits(facts: ScriptFacts, value: str) -> str | None:
    if not facts.variables.get(_NAME):
        return f"{_NAME} is not set, so torch already uses the widest vectors"
    if facts.device != "cpu":
        return "the model is not on the CPU"
    return None


def environment(value: str, variables: Mapping[str, str]) -> dict[str, str | None]:
    return {_NAME: None}


def apply(training: TrainingProcess, value: str) -> None:
    """A script may set it before it imports torch, which reads it at the first operator."""
    if os.environ.pop(_NAME, None) is not None:
        training.did(f"{_NAME} is unset")


def patch(script: Script, value: str) -> Proposal:
    return Proposal(by_hand=(f"unset {_NAME} where the command is started, or the script sets it",))


FIX = Fix(
    id="vectors",
    effect=Effect.ROUNDING,
    fits=fits,
    apply=apply,
    environment=environment,
    patch=patch,
)
