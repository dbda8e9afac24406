"""Memory that is still alive at the end of each step, over the whole run: does it grow for ever?

What counts is the floor: the least that is alive at this step or at any later one. Memory that the
garbage collector frees later lies above it, and so do the teeth of a saw. A cache that fills up
raises the floor, then leaves it flat. So growth must go on through all of the run: the floor rises
in each sixth of what comes after the first quarter, in none of them at less than a quarter of the
usual pace, and in the end no slower than at half of the pace of the beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from stepscope.explain.whole_run.trends import robust_slope
from stepscope.records.whole_run import MemoryGrowth

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.step_columns import StepColumns

    Floats = NDArray[np.float64]

_FEWEST_READINGS = 24
_WARM_UP = 0.25  # of the run
_PIECES = 6
_STEADY = 0.25  # of the usual pace
_GOES_ON = 0.5  # of the pace of the beginning
_LEAST_SHARE = 0.01  # of what is alive, over the run
# Below this, an allocator's own holes may fill up; a process also maps libraries and buffers.
_LEAST_BYTES: dict[str, float] = {"device": 4e6, "host": 32e6}


def find_memory_growth(
    columns: StepColumns, of: Literal["device", "host"] = "device"
) -> MemoryGrowth | None:
    """None where memory was not read, was read too seldom, or does not grow."""
    if columns.allocated_bytes is None:
        return None
    read = (columns.allocated_bytes >= 0) & ~columns.window & ~columns.memory
    numbers = columns.number[read].astype(np.float64)
    alive = columns.allocated_bytes[read].astype(np.float64)
    late = np.searchsorted(numbers, _warm_up_end(numbers)) if len(numbers) else 0
    numbers, alive = numbers[late:], alive[late:]
    if len(numbers) < _FEWEST_READINGS or not _keeps_rising(numbers, _floor(alive)):
        return None
    growth = _measure(numbers, alive, of)
    grown = growth.bytes_per_step * float(numbers[-1] - numbers[0]) if growth else 0.0
    least = max(_LEAST_BYTES[of], _LEAST_SHARE * float(alive[-1]))
    return growth if grown >= least else None


def _warm_up_end(numbers: Floats) -> float:
    return float(numbers[0] + _WARM_UP * (numbers[-1] - numbers[0]))


def _floor(alive: Floats) -> Floats:
    """The least from each reading to the end."""
    floor: Floats = np.minimum.accumulate(alive[::-1])[::-1]
    return floor


def _keeps_rising(numbers: Floats, floor: Floats) -> bool:
    edges = np.linspace(numbers[0], numbers[-1], _PIECES + 1)
    at = floor[np.minimum(np.searchsorted(numbers, edges), len(floor) - 1)]
    rises = np.diff(at)
    third = _PIECES // 3
    goes_on = rises[-third:].sum() >= _GOES_ON * rises[:third].sum()
    return bool(rises.min() > 0 and goes_on and rises.min() >= _STEADY * np.median(rises))


def _measure(numbers: Floats, alive: Floats, of: Literal["device", "host"]) -> MemoryGrowth | None:
    """The floor's own slope. Readings may lie unevenly, so the floor is read at even steps."""
    even = np.linspace(numbers[0], numbers[-1], len(numbers))
    slope, low, high = robust_slope(np.interp(even, numbers, _floor(alive)))
    if low <= 0:
        return None
    steps = float(even[1] - even[0])  # between two readings
    return MemoryGrowth(
        bytes_per_step=slope / steps,
        low=low / steps,
        high=high / steps,
        first_bytes=int(alive[0]),
        last_bytes=int(alive[-1]),
        of=of,
    )
