"""What a what-if gives back: the changed step and what was assumed, or why it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import StepGraph
    from stepscope.predict.step_context import StepContext
    from stepscope.records.prediction import Peak


class Refused(Exception):  # noqa: N818 - an answer, not a failure
    """This step has nothing for the what-if to change, or the trace does not tell enough."""


class WrongValue(Refused):
    """No step could be changed like that: the value itself makes no sense."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`spread` is the relative error that such a what-if had on models it was not fitted to, of the
    part of the step that it changes."""

    context: StepContext
    assumptions: tuple[str, ...]
    spread: float
    doubt: float = 0.0  # of the logarithm of the whole step, where the what-if knows it itself
    samples: float = 1.0  # a step's samples, times this
    repeats: float = 1.0  # so often the same work: that much longer adds no doubt
    peak: Peak | None = None


def changed(context: StepContext, graph: StepGraph) -> StepContext:
    """The context with another graph, whose tasks are looked at anew."""
    return replace(context, graph=graph)
