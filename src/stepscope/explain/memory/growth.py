"""Does memory grow from step to step? A leak grows by about the same amount in every step.

Bytes alive are compared at the ends of steps. The first steps of a run are left out: they create
optimizer state, caches and workspaces. Fewer than three steps of growth prove nothing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import numpy as np

from stepscope.explain.quantiles import median
from stepscope.records.memory import Growth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.memory.lifetimes import Lifetimes
    from stepscope.records.explanation import Steps

FIRST_STEPS = 3
LEAST_INCREASES = 3
MOST_ENDS = 64  # of a long run: its last steps say enough
_ALIKE = 0.5  # an increase may be this much smaller or larger than the median
_NUMBER = re.compile(r"#(\d{1,18})$")


def growth_of(
    source: Literal["steps", "trace", "capture"], ends_bytes: Sequence[int], skipped: int = 0
) -> Growth | None:
    """None for fewer than two ends."""
    if len(ends_bytes) < 2:
        return None
    increases = np.diff(np.array(ends_bytes, np.int64)).tolist()
    typical = median(increases)
    steady = len(increases) >= LEAST_INCREASES and all(
        increase > 0 and abs(increase - typical) <= _ALIKE * typical for increase in increases
    )
    return Growth(
        source=source,
        ends_bytes=tuple(ends_bytes),
        bytes_per_step=round(typical),
        steady=steady,
        skipped=skipped,
    )


def growth_of_steps(rows: Sequence[tuple[int, int]]) -> Growth | None:
    """From (step, bytes at its end) of steps.jsonl: the last steps that were read one after the
    other. Growth over the whole run is found in whole_run/memory_growth.py."""
    first = next((place for place, (step, _) in enumerate(rows) if step >= FIRST_STEPS), len(rows))
    start = max(first, len(rows) - MOST_ENDS)
    for place in range(len(rows) - 1, start, -1):
        if rows[place][0] - rows[place - 1][0] != 1:
            start = place
            break
    return growth_of("steps", [size for _, size in rows[start:]], skipped=first)


def growth_of_trace(lifetimes: Lifetimes, steps: Steps) -> Growth | None:
    """From allocator events: what is allocated at the end of each marked step."""
    if steps.source == "window":
        return None
    counted = [step for step in steps.steps if _number(step.name) >= FIRST_STEPS]
    ends = np.array([step.start_ns + step.dur_ns for step in counted], np.int64)
    place = np.searchsorted(lifetimes.time_ns, ends, side="right") - 1
    if len(place) and place[0] < 0:
        return None
    sizes = lifetimes.allocated_bytes[place].tolist()
    return growth_of("trace", sizes, skipped=len(steps.steps) - len(counted))


def _number(name: str) -> int:
    """7 for ProfilerStep#7; a step without a number counts as a late one."""
    match = _NUMBER.search(name)
    return int(match[1]) if match else FIRST_STEPS
