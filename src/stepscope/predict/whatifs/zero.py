"""zero=STAGE: optimizer state (1), gradients too (2), parameters too (3) shared by the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.explain.memory.theory import VOLUME, bytes_per_parameter, zero_bytes
from stepscope.predict import scale_out
from stepscope.predict.outcome import WrongValue
from stepscope.records.prediction import Peak

if TYPE_CHECKING:
    from stepscope.predict.outcome import Outcome
    from stepscope.predict.step_context import StepContext

HELP = "shard optimizer state (1), gradients too (2), parameters too (3) over the workers"
_DOUBT = 0.08  # of the step: who gathers what when differs between implementations


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses for one worker, which has nobody to share with."""
    if value not in ("1", "2", "3"):
        raise WrongValue(f"zero={value}: choose stage 1, 2 or 3")
    stage = int(value)
    found = scale_out.replan(context, stage=stage)
    told = found.context.exchange
    ranks = told.ranks if told else 1
    each = bytes_per_parameter(stage, ranks)
    return replace(
        found,
        assumptions=(
            *found.assumptions,
            f"{VOLUME[stage]:g} times the bytes of plain data parallelism on the wire; the "
            f"optimizer works on 1/{ranks} of the parameters",
            f"with mixed-precision Adam a worker would hold {each:.2f} bytes a parameter "
            f"instead of {bytes_per_parameter(0, ranks):.0f}",
        ),
        doubt=(found.doubt**2 + _DOUBT**2) ** 0.5,
        peak=_peak(context, stage, ranks),
    )


def _peak(context: StepContext, stage: int, ranks: int) -> Peak | None:
    """What is measured, with the shared part of it divided; stage 3 gathers a layer at a time."""
    memory = context.memory
    if memory is None or memory.peak_bytes is None:
        return None
    held = {name: memory.categories.get(name) for name in ("parameters", "gradients", "optimizer")}
    if any(size is None for size in held.values()):
        return None
    whole = {name: size or 0 for name, size in held.items()}
    size = memory.peak_bytes - sum(whole.values()) + zero_bytes(stage, ranks, **whole)
    gathered = whole["parameters"] // 4 if stage == 3 else 0
    return Peak(size_bytes=size, low_bytes=size, high_bytes=size + gathered)
