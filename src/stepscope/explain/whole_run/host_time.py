"""The host's own time of a step, from steps in which it never waited for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.quantiles import median
from stepscope.explain.replay.graph import QUEUE_DEPTH
from stepscope.records.step_columns import USUAL_PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.host_steps import HostStepTimes
    from stepscope.records.step_columns import StepColumns

_PHASES = ("data", "forward", "backward", "optimizer")
_FEWEST = 2
_FEWEST_FREE = 3


def own_phases_ns(steps: Sequence[HostStepTimes]) -> dict[str, int]:
    """By phase; empty if too few steps were measured, or other ranks trained: the queue then fills
    up inside the step.

    Stopping inside forward costs a little, and not stopping may let the queue fill up: both only
    add, so the shorter of the two counts.
    """
    own = [step for step in steps if step.alone]
    if len(own) < _FEWEST:
        return {}
    kinds = [[step for step in own if step.fine == fine] for fine in (False, True)]
    return {
        phase: round(min(_median_ns(kind, phase) for kind in kinds if kind)) for phase in _PHASES
    }


def free_phases_ns(steps: StepColumns, launches: int) -> dict[str, int]:
    """By phase, from plain steps that began with an empty queue, after a window or a step of
    ours. A step that launches less than the queue holds has nothing to wait for then, and nothing
    stopped it either. Empty for a step with more launches, or if too few began so.

    Only for steps that call nothing that waits for the device.
    """
    ours = steps.window | steps.memory
    free = np.zeros(len(steps), np.bool_)
    free[1:] = ours[:-1] & (np.diff(steps.number) == 1)
    free &= steps.plain
    if launches > QUEUE_DEPTH or np.count_nonzero(free) < _FEWEST_FREE:
        return {}
    phases = {phase: steps.phases_ns.get(phase) for phase in USUAL_PHASES}
    return {
        phase: round(float(np.median(column[free]))) if column is not None else 0
        for phase, column in phases.items()
    }


def _median_ns(steps: Sequence[HostStepTimes], phase: str) -> float:
    return median([float(getattr(step, f"{phase}_ns")) for step in steps])
