"""What a what-if gives back: the changed step and what was assumed, or why it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import StepGraph
    from stepscope.predict.step_context import StepContext
    from stepscope.records.prediction import PeakMemory


class Refused(Exception):  # noqa: N818 - an answer, not a failure
    """There is nothing in this step to change, or the trace does not hold enough to tell."""


class NothingToChange(Refused):
    """The step is so already, or has nothing that this could change."""


class WrongValue(Refused):
    """The value makes no sense for any step."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    context: StepContext
    assumptions: tuple[str, ...]
    # The relative error of this what-if on models it was not fitted to, for what it changes.
    spread: float
    doubt: float = 0.0  # of the logarithm of the whole step, if the what-if knows it
    doubt_is_whole: bool = False  # nothing is added for the size of the change
    samples: float = 1.0  # samples per step over those before
    repeats: float = 1.0  # how often the same work repeats: that adds time but no doubt
    peak: PeakMemory | None = None


def changed(context: StepContext, graph: StepGraph) -> StepContext:
    """The context with another graph; what it caches about the old one goes."""
    return replace(context, graph=graph)
