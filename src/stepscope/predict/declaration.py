"""Declare a what-if: its record in whatifs/, the outcome it returns, the reasons it refuses
with, and the values that users write.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum, auto
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext
    from stepscope.records.prediction import PeakMemory
    from stepscope.step.graph import Flags, StepGraph

# What a what-if declares about itself: whatifs/__init__.py has the table of all of them.


class ApplyStage(IntEnum):
    """Changes are made in this order, whatever order they were asked for in.

    What-ifs read the trace as well as the graph. So removing and shortening come first, while the
    two still agree. Next comes another GPU, whose rates then price operators by their shapes, then
    what grows or repeats tasks, then the exchange between workers, which is planned as a whole. A
    CUDA graph comes last: it leaves one call and no phases.
    """

    REMOVE = auto()
    SCALE = auto()
    STOP_WAITING = auto()
    THREADS = auto()
    GPU = auto()
    PRECISION = auto()
    OPTIMIZER = auto()
    FUSE = auto()
    BATCH = auto()
    RECOMPUTE = auto()
    ACCUMULATE = auto()
    WORKERS = auto()
    SHARD = auto()
    BUCKETS = auto()
    LINKS = auto()
    BALANCE = auto()
    LAUNCH_ONCE = auto()


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # on the command line
    help: str  # one line for `stepscope whatif --list`
    label: str | Callable[[str], str]  # what people call it; {} stands for the value
    stage: ApplyStage
    apply: Apply
    takes_value: bool = True
    value_is_optional: bool = False
    repeatable: bool = False  # may be given more than once
    usual: tuple[str, ...] = ()  # values worth trying on any step
    for_several_ranks: bool = False  # tried only on a job of several ranks
    needs_every_step: bool = False  # tried only if all steps of the run are known
    saves_memory: tuple[str, ...] = ()  # values that save memory and cost time
    is_goal: bool = False  # nobody can make this change as such; a finding says how to get there
    keeps_peak: bool = False  # peak memory stays as it is
    joins_peak: bool = False  # its peak counts the changes made before it
    shares_batch: Callable[[str], bool] | None = None  # if so, the peak joins others too
    needs_ceilings: bool = True  # priced by calibrated rates, not by the trace alone
    # Remedies of findings that this predicts, each with the values to try; the best one counts.
    # What `run --with` spells otherwise stands in records/remedies.py.
    remedies: dict[str, tuple[str, ...]] = {}

    def describe(self, value: str) -> str:
        """The change with this value, as people call it."""
        if not isinstance(self.label, str):
            return self.label(value)
        if self.takes_value and not value:
            return self.name
        return self.label.format(value)


# What a what-if gives back: the changed step and what was assumed, or why it refuses.


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


# Values that users write: 2, 0.5, x2.

_FACTORS = {0.5: "half", 2.0: "twice"}


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


def describe_factor(value: str) -> str:
    """2 is twice, 0.5 is half, 3 is 3 times."""
    try:
        factor = float(value.removeprefix("x"))
    except ValueError:
        return value
    return _FACTORS.get(factor) or f"{factor:g} times"


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


if TYPE_CHECKING:
    Apply = Callable[[StepContext, str], Outcome]
