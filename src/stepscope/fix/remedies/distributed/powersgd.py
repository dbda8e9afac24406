"""Gradients exchanged as low-rank products: DDP's powerSGD_hook. The value is the rank.

What the product leaves out of a gradient is added to the next one. The first steps exchange whole
gradients, as torch requires.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.errors import RefusedError
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

# The hook makes calls as others end: on gloo two buckets may make theirs in another order per rank.
_NEEDS_ORDER = "torch's powerSGD_hook needs NCCL. Over gloo, ranks may wait for each other forever"
_WHOLE_STEPS = 10  # with whole gradients, before compression begins


def fits(facts: ScriptFacts, value: str) -> str | None:
    why_not = why_no_ddp(facts)
    if why_not is not None:
        return why_not
    if facts.device == "cpu" or facts.backend == "gloo":
        return _NEEDS_ORDER
    return None


def apply(training: TrainingProcess, value: str) -> None:
    def make(ddp: Any) -> tuple[Any, Any]:
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
            PowerSGDState,
            powerSGD_hook,
        )

        if ddp.device.type == "cpu" or dist.get_backend(ddp.process_group) == "gloo":
            raise RefusedError(_NEEDS_ORDER)
        state = PowerSGDState(
            ddp.process_group,
            matrix_approximation_rank=int(value),
            start_powerSGD_iter=_WHOLE_STEPS,
        )
        return state, powerSGD_hook

    words = (
        f"gradients are exchanged as low-rank products (rank {value}) after {_WHOLE_STEPS} steps"
    )
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


FIX = Fix(
    id="powersgd",
    effect=Effect.TRAINING,
    family="ddp-hook",
    values=("1", "4"),
    accepts=lambda value: value.isdecimal() and int(value) > 0,
    fits=fits,
    apply=apply,
    patch=patch,
)
