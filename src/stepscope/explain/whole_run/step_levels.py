"""What each step should have taken, by its inputs, its level and the drift: stalls are judged
against it, so a long batch, a new level or a slow growth makes no stalls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.whole_run.input_effect import explain_by_inputs
from stepscope.explain.whole_run.level_changes import (
    change_places,
    find_level_changes,
    typical_levels,
)
from stepscope.explain.whole_run.trends import find_trend, follows_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.whole_run import InputEffect, LevelChange, Trend

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


class StepLevels(msgspec.Struct, frozen=True, kw_only=True):
    """`level` is each step's typical time."""

    level: Floats
    changes: tuple[LevelChange, ...]
    trend: Trend | None
    inputs: InputEffect | None


def _explain(step_ns: Floats, elements: Ints | None) -> tuple[InputEffect | None, Floats]:
    """What inputs explain, and each step's time by them over that of the median batch."""
    if elements is None or not len(step_ns):
        return None, np.ones(len(step_ns))
    inputs, expected = explain_by_inputs(step_ns, elements.astype(np.float64))
    return inputs, expected / max(float(np.median(expected)), 1.0)


def find_step_levels(
    step_ns: Floats,
    numbers: Ints,
    elements: Ints | None = None,
    allocated_bytes: Ints | None = None,
) -> StepLevels:
    """Of the steady steps. Changes and drift are those that inputs do not explain."""
    inputs, expected = _explain(step_ns, elements)
    alike = step_ns / expected  # as if all batches were the median one
    changes = find_level_changes(alike, numbers)
    if inputs is not None and changes:
        # Now that the levels are known, the inputs' own part is clearer, and then the levels are.
        level = typical_levels(alike, numbers, changes)
        inputs, expected = _explain(step_ns / level * float(np.median(level)), elements)
        alike = step_ns / expected
        changes = find_level_changes(alike, numbers)
    trend = find_trend(alike, change_places(numbers, changes))
    if trend is not None and allocated_bytes is not None:
        memory = follows_memory(alike, allocated_bytes.astype(np.float64))
        trend = replace(trend, follows_memory=memory)
    level = typical_levels(alike, numbers, changes, trend.per_step if trend else 0.0) * expected
    return StepLevels(level=level, changes=changes, trend=trend, inputs=inputs)
