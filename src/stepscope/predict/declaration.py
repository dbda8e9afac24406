"""Say what a what-if gives back: the changed step and what was assumed, or why it refuses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext
    from stepscope.records.prediction import PeakMemory
    from stepscope.step.graph import Flags, StepGraph


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


def parse_positive(name: str, value: str, wanted: str) -> float:
    """Raises WrongValue for anything but a positive number."""
    try:
        number = float(value.removeprefix("x"))
    except ValueError:
        number = 0.0
    if not number > 0 or not math.isfinite(number):
        raise WrongValue(f"{name}={value}: give {wanted}")
    return number


def parse_whole(value: str) -> int:
    """A whole number; 0 for anything else, which no what-if takes."""
    try:
        return int(value)
    except ValueError:
        return 0


# Steps whose kernels belong to no known operator, as CUDA graphs without their recording.

_MOST = 0.5  # of the device's time


def find_unknown(context: StepContext) -> Flags:
    """Tasks of the trace without an operator."""
    unknown: Flags = (context.graph.tasks.row >= 0) & (context.operators.row < 0)
    return unknown


def require_operators(context: StepContext, change: str) -> None:
    """Refuse a change of operators where most of the device's time is not known by operator."""
    dur_ns = context.graph.tasks.dur_ns
    if dur_ns[find_unknown(context)].sum() > _MOST * dur_ns.sum():
        raise Refused(
            f"{change}: the trace does not say which operators launched its kernels. With "
            "CUDA graphs, record an eager step, or the graph's capture, in the same window"
        )
