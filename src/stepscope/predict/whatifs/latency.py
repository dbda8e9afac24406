"""latency=FACTOR: collectives that take FACTOR times as long to start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.predict.declaration import (
    ApplyStage,
    Outcome,
    WhatIf,
    describe_factor,
    parse_positive,
)

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses a step that exchanges nothing."""
    from stepscope.predict.scale_out import replan

    factor = parse_positive("latency", value, "a factor, such as latency=0.5")
    return replan(context, latency=factor)


WHATIF = WhatIf(
    name="latency",
    help="collectives with N times the latency (latency=0.5)",
    label=lambda value: f"{describe_factor(value)} the latency",
    stage=ApplyStage.LINKS,
    apply=apply,
    keeps_peak=True,
)
