"""The host's own time of a step, from steps in which it never waited for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.quantiles import median

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.host_steps import HostStepTimes

_PHASES = ("data", "forward", "backward", "optimizer")
_FEWEST = 2


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


def _median_ns(steps: Sequence[HostStepTimes], phase: str) -> float:
    return median([float(getattr(step, f"{phase}_ns")) for step in steps])
