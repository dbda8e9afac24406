"""Gradients that live in DDP's buckets instead of being copied there: gradient_as_bucket_view."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.fix.built_objects import all_have, give_ddp, why_no_ddp, write_ddp
from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import ScriptFacts

_OPTION = "gradient_as_bucket_view"


def fits(facts: ScriptFacts, value: str) -> str | None:
    why_not = why_no_ddp(facts)
    if why_not is None and all_have(facts, _OPTION):
        return "gradients are views of the buckets already"
    return why_not


def apply(training: TrainingProcess, value: str) -> None:
    give_ddp(training, {_OPTION: True})


def patch(script: Script, value: str) -> Proposal:
    return write_ddp(script, {_OPTION: "True"})


FIX = Fix(
    id="bucket-view",
    effect=Effect.ROUNDING,  # DDP divides by the number of ranks instead of multiplying by 1/ranks
    fits=fits,
    apply=apply,
    patch=patch,
)
