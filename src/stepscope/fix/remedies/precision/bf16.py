"""Forward and loss under bf16 autocast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.fix.remedies.precision.autocast import (
    ask_trainer,
    enter_until_backward,
    why_not_autocast,
    wrap_forward,
)
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess


def fits(facts: ScriptFacts, value: str) -> str | None:
    if facts.bf16 is False:
        device = "CPU" if facts.device == "cpu" else "GPU"
        return f"this {device} has no instructions for bf16 matmuls"
    if facts.of_kind("scaler"):
        return "the script has its own GradScaler, which bf16 does not need"
    return why_not_autocast(facts)


def apply(training: TrainingProcess, value: str) -> None:
    enter_until_backward(training, "bfloat16")


def patch(script: Script, value: str) -> Proposal:
    proposal = wrap_forward(script, "bfloat16")
    return ask_trainer(script.facts, "bf16") or proposal if proposal.by_hand else proposal


FIX = Fix(
    id="bf16",
    effect=Effect.RANDOM,  # dropout's kernels of 16 bits draw others
    may_be=Effect.ROUNDING,
    family="precision",
    after=frozenset({"compile"}),  # the host, which autocast costs more, no longer sets the pace
    fits=fits,
    apply=apply,
    patch=patch,
)
