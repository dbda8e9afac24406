"""Gradients exchanged in bf16, half the bytes: DDP's bf16_compress_hook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.fix.remedies.distributed.ddp import (
    FOLDER,
    HookSource,
    register,
    why_no_ddp,
    write_registration,
)
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess

_SOURCE = HookSource(
    module=f"{FOLDER}.default_hooks",
    names=("bf16_compress_hook",),
    state="{ddp}.process_group",
    hook="bf16_compress_hook",
)


def fits(facts: ScriptFacts, value: str) -> str | None:
    why_not = why_no_ddp(facts)
    if why_not is not None:
        return why_not
    if facts.device == "cpu":
        return "torch allows bf16_compress_hook on CUDA devices with NCCL only"
    if facts.dtypes and "float32" not in facts.dtypes:
        return "no gradient is fp32"
    return None


def apply(training: TrainingProcess, value: str) -> None:
    def make(ddp: Any) -> tuple[Any, Any]:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        return ddp.process_group, bf16_compress_hook

    register(training, "gradients are exchanged in bf16", make)


def patch(script: Script, value: str) -> Proposal:
    return write_registration(script, _SOURCE)


FIX = Fix(
    id="compress-gradients",
    effect=Effect.ROUNDING,
    family="ddp-hook",
    fits=fits,
    apply=apply,
    patch=patch,
)
