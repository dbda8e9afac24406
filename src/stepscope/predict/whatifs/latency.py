"""latency=FACTOR: collectives that take so many times as long to get going."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.predict import scale_out
from stepscope.predict.values import parse_positive

if TYPE_CHECKING:
    from stepscope.predict.outcome import Outcome
    from stepscope.predict.step_context import StepContext

HELP = "collectives with N times the latency (latency=0.5)"


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses where nothing is exchanged."""
    factor = parse_positive("latency", value, "a factor, such as latency=0.5")
    return scale_out.replan(context, latency=factor)
