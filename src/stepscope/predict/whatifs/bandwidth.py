"""bandwidth=FACTOR: links that move so many times as many bytes a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.predict import scale_out
from stepscope.predict.values import parse_positive

if TYPE_CHECKING:
    from stepscope.predict.outcome import Outcome
    from stepscope.predict.step_context import StepContext

HELP = "links with N times the bandwidth (bandwidth=2)"


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses where nothing is exchanged."""
    factor = parse_positive("bandwidth", value, "a factor, such as bandwidth=2")
    return scale_out.replan(context, bandwidth=factor)
