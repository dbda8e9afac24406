"""What a what-if declares about itself: each file in whatifs/ holds one such record, `WHATIF`."""

from __future__ import annotations

from enum import IntEnum, auto
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.predict.outcome import Outcome
    from stepscope.predict.step_context import StepContext

    Apply = Callable[[StepContext, str], Outcome]


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
    name: str  # on the command line; the file has the same name
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
    # What `run --with` spells otherwise stands in records/same_change.py.
    remedies: dict[str, tuple[str, ...]] = {}

    def describe(self, value: str) -> str:
        """The change with this value, as people call it."""
        if not isinstance(self.label, str):
            return self.label(value)
        if self.takes_value and not value:
            return self.name
        return self.label.format(value)
