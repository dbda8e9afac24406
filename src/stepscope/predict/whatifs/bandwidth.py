"""bandwidth=FACTOR: links with FACTOR times the bandwidth."""

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

    factor = parse_positive("bandwidth", value, "a factor, such as bandwidth=2")
    return replan(context, bandwidth=factor)


WHATIF = WhatIf(
    name="bandwidth",
    help="links with N times the bandwidth (bandwidth=2)",
    label=lambda value: f"{describe_factor(value)} the bandwidth",
    stage=ApplyStage.LINKS,
    apply=apply,
    usual=("2",),
    for_several_ranks=True,
    is_goal=True,
    keeps_peak=True,
    # bf16 gradients are half the bytes of fp32 ones.
    remedies={"bandwidth": ("2",), "compress-gradients": ("2",)},
)
