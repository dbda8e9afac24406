"""What takes longer after a change of level: a phase of the step, or the wait for a free core."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.whole_run.level_changes import change_places
from stepscope.records.step_columns import USUAL_PHASES
from stepscope.records.whole_run import CORE_WAIT

if TYPE_CHECKING:
    from stepscope.records.step_columns import Flags, StepColumns
    from stepscope.records.whole_run import LevelChange


def add_causes(
    changes: tuple[LevelChange, ...], steps: StepColumns, steady: Flags
) -> tuple[LevelChange, ...]:
    """The same changes, each with what grew between the level before and its own."""
    numbers = steps.number[steady]
    edges = [0, *change_places(numbers, changes), len(numbers)]
    levels = [slice(start, end) for start, end in itertools.pairwise(edges)]
    parts = [_parts_ms(steps, steady, level) for level in levels]
    return tuple(
        replace(change, more_ms={name: after[name] - before[name] for name in after})
        for change, (before, after) in zip(changes, itertools.pairwise(parts), strict=True)
    )


def _parts_ms(steps: StepColumns, steady: Flags, level: slice) -> dict[str, float]:
    """Phases of a typical step. Waits for a core are read now and then, so only their mean says
    how long they are."""
    parts = {
        phase: float(np.median(steps.phases_ns[phase][steady][level])) / 1e6
        for phase in USUAL_PHASES
        if phase in steps.phases_ns and level.stop > level.start
    }
    if steps.cpu_wait_ns is not None and level.stop > level.start:
        parts[CORE_WAIT] = float(np.mean(steps.cpu_wait_ns[steady][level])) / 1e6
    return parts
