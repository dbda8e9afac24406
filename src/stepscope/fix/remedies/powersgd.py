"""Gradients exchanged as low-rank products: DDP's powerSGD_hook. The value is the rank.

What the product leaves out of a gradient is added to the next one. The first steps exchange whole
gradients, as torch requires.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.fix.ddp_hooks import FOLDER, HookSource, register, write_registration
from stepscope.fix.ddp_options import why_no_ddp
from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.refusal import RefusedError

if TYPE_CHECKING:
    from stepscope.fix.proposal import Proposal, Script
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import ScriptFacts

_WHOLE_STEPS = 10  # with whole gradients, before compression begins


def fits(facts: ScriptFacts, value: str) -> str | None:
    why_not = why_no_ddp(facts)
    if why_not is not None:
        return why_not
    return None if _is_rank(value) else _not_a_rank(value)


def apply(training: TrainingProcess, value: str) -> None:
    if not _is_rank(value):
        raise RefusedError(_not_a_rank(value))

    def make(ddp: Any) -> tuple[Any, Any]:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
            PowerSGDState,
            powerSGD_hook,
        )

        state = PowerSGDState(
            ddp.process_group,
            matrix_approximation_rank=int(value),
            start_powerSGD_iter=_WHOLE_STEPS,
        )
        return state, powerSGD_hook

    words = f"gradients are exchanged as products of rank {value} after {_WHOLE_STEPS} steps"
    register(training, words, make)


def patch(script: Script, value: str) -> Proposal:
    arguments = (
        "{ddp}.process_group, "
        f"matrix_approximation_rank={int(value)}, start_powerSGD_iter={_WHOLE_STEPS}"
    )
    source = HookSource(
        module=f"{FOLDER}.powerSGD_hook",
        names=("PowerSGDState", "powerSGD_hook"),
        state=f"PowerSGDState({arguments})",
        hook="powerSGD_hook",
    )
    return write_registration(script, source)


def _is_rank(value: str) -> bool:
    return value.isdecimal() and int(value) > 0


def _not_a_rank(value: str) -> str:
    return f"{value!r} is not the rank of a matrix: give one such as powersgd=2"


FIX = Fix(
    id="powersgd",
    effect=Effect.TRAINING,
    family="ddp-hook",
    values=("1", "4"),
    fits=fits,
    apply=apply,
    patch=patch,
)
