"""Quality beside speed: whether a training reached its target, after how many steps and seconds.

A remedy that makes steps faster and training worse takes longer to the target.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.bench.workload import Target


class TargetOutcome(NamedTuple):
    """`reached` is None where the training was shorter than the target allows."""

    reached: bool | None
    steps: int | None = None
    seconds: float | None = None


def reach_target(
    losses: Sequence[float | None], target: Target, step_ms: float | None
) -> TargetOutcome:
    """A loss that is no finite number is None. Time is of steady steps, without start-up."""
    steps = steps_to_target(losses, target)
    if steps is None:
        return TargetOutcome(False if len(losses) >= target.steps else None)
    seconds = steps * step_ms / 1e3 if step_ms is not None else None
    return TargetOutcome(True, steps, seconds)


def steps_to_target(losses: Sequence[float | None], target: Target) -> int | None:
    """The first step at which the mean of the last `target.over` losses is low enough."""
    values = [math.inf if loss is None else loss for loss in losses[: target.steps]]
    for end in range(target.over, len(values) + 1):
        if sum(values[end - target.over : end]) / target.over <= target.loss:
            return end
    return None
