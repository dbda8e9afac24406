"""zero=STAGE: workers share optimizer state (1), also gradients (2), also parameters (3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.predict.declaration import Outcome, WrongValue
from stepscope.records.prediction import PeakMemory
from stepscope.text.figures import significant

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext

_DOUBT = 0.08  # of the step: implementations differ in what they gather when


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses one worker: it has nobody to share with."""
    from stepscope.explain.memory.model import VOLUME, bytes_per_parameter
    from stepscope.predict.scale_out import replan

    if value not in ("1", "2", "3"):
        raise WrongValue(f"zero={value}: choose stage 1, 2 or 3")
    stage = int(value)
    outcome = replan(context, stage=stage)
    exchange = outcome.context.exchange
    ranks = exchange.ranks if exchange else 1
    return replace(
        outcome,
        assumptions=(
            *outcome.assumptions,
            f"{VOLUME[stage]:g} times the bytes of plain data parallelism are sent. The "
            f"optimizer works on 1/{ranks} of the parameters",
            "with mixed-precision Adam a worker would hold "
            f"{significant(bytes_per_parameter(stage, ranks))} bytes per parameter instead of "
            f"{significant(bytes_per_parameter(0, ranks))}",
        ),
        doubt=(outcome.doubt**2 + _DOUBT**2) ** 0.5,
        peak=_peak(context, stage, ranks),
    )


def _peak(context: StepContext, stage: int, ranks: int) -> PeakMemory | None:
    """The measured peak with its shared part divided; stage 3 gathers one layer at a time."""
    from stepscope.explain.memory.model import zero_bytes

    memory = context.memory
    if memory is None or memory.peak_bytes is None:
        return None
    held = {name: memory.categories.get(name) for name in ("parameters", "gradients", "optimizer")}
    if any(size is None for size in held.values()):
        return None
    whole = {name: size or 0 for name, size in held.items()}
    size = memory.peak_bytes - sum(whole.values()) + zero_bytes(stage, ranks, **whole)
    gathered = whole["parameters"] // 4 if stage == 3 else 0
    return PeakMemory(size_bytes=size, low_bytes=size, high_bytes=size + gathered)
