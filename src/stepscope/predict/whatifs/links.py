"""bandwidth=FACTOR and latency=FACTOR: links with so many times the bandwidth, or collectives that
take so many times as long to start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.predict.declaration import (
    Outcome,
    parse_positive,
)

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext


def apply_bandwidth(context: StepContext, value: str) -> Outcome:
    """Refuses a step that exchanges nothing."""
    from stepscope.predict.scale_out import replan

    factor = parse_positive("bandwidth", value, "a factor, such as bandwidth=2")
    return replan(context, bandwidth=factor)


def apply_latency(context: StepContext, value: str) -> Outcome:
    """Refuses a step that exchanges nothing."""
    from stepscope.predict.scale_out import replan

    factor = parse_positive("latency", value, "a factor, such as latency=0.5")
    return replan(context, latency=factor)
