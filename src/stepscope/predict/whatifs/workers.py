"""workers=N: N replicas of the model, gradients summed by DDP. workers=N:strong divides the batch
among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.predict.declaration import (
    ApplyStage,
    Outcome,
    Refused,
    WhatIf,
    WrongValue,
    parse_whole,
)
from stepscope.text.words import plural

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext

_MAX_WORKERS = 1 << 20
_NOT_THE_LOADERS = (
    "workers are data-parallel ranks. For workers of the DataLoader write loader-workers=N"
)


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses if the cost of an all-reduce or the sizes of the gradients are not known."""
    from stepscope.predict.scale_out import replan

    number, _, scaling = value.partition(":")
    count = parse_whole(number)
    if not 1 <= count <= _MAX_WORKERS or scaling not in ("", "strong", "weak"):
        raise WrongValue(f"workers={value}: give their number, such as 8, or 8:strong")
    alone = context.job is None and not context.trace.collectives
    hint = _NOT_THE_LOADERS if alone and context.analysis.inputs.loader else ""
    try:
        outcome = replan(context, ranks=count, strong=scaling == "strong")
    except Refused as reason:
        raise (Refused(f"{reason}. {hint}") if hint else reason) from None
    return replace(outcome, assumptions=(*outcome.assumptions, hint)) if hint else outcome


def _label(value: str) -> str:
    count = value.partition(":")[0]
    shared = " (sharing the batch)" if _shares_batch(value) else ""
    return f"{count} {plural(parse_whole(count), 'worker')}{shared}"


def _shares_batch(value: str) -> bool:
    return value.endswith(":strong")


WHATIF = WhatIf(
    name="workers",
    help="N data-parallel workers, each with its own batch (workers=8; 8:strong divides one batch)",
    label=_label,
    stage=ApplyStage.WORKERS,
    apply=apply,
    keeps_peak=True,
    shares_batch=_shares_batch,
)
