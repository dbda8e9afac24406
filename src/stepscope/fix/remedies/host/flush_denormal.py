"""Values too small for a full mantissa become 0: CPUs compute with them many times slower."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.errors import RefusedError
from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess

_LINE = "torch.set_flush_denormal(True)"


def fits(facts: ScriptFacts, value: str) -> str | None:
    if facts.device != "cpu":
        return "the model is not on the CPU"
    if facts.flushes_denormals:
        return "denormal values are 0 already"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    """Before torch starts its threads: each takes the mode over from the one that starts it."""
    import torch

    if not torch.set_flush_denormal(True):
        raise RefusedError("this processor cannot")
    training.did("denormal values are 0")


def patch(script: Script, value: str) -> Proposal:
    found = script.source_of(script.facts.forward[::-1])
    if found is None:
        return Proposal(by_hand=(f"before training: {_LINE}",))
    source, _ = found
    return Proposal(edits=(*source.ensure_import("torch"), source.insert_after_imports(_LINE)))


FIX = Fix(id="flush-denormal", effect=Effect.ROUNDING, fits=fits, apply=apply, patch=patch)
