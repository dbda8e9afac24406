"""When workers start and end their steps, if servers answer at once: one pass over the clocks.

A worker's clock counts the steps it has pushed. Consistency says which clock all workers must have
reached before one of them may start a step (`needed_clocks`). So the start of a step is the
later of two times, and all workers of all runs are computed at once, clock after clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.consistency import Consistency

    Floats = NDArray[np.float64]


class SimulatedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """(runs, steps, workers) in nanoseconds; infinite for a step that was not simulated. A step
    starts when its worker may pull, and ends when its update is applied."""

    start_ns: Floats
    end_ns: Floats


def needed_clocks(consistency: Consistency, steps: int) -> NDArray[np.int64]:
    """For each of a worker's steps, the clock that all workers must have reached before it."""
    clock = np.arange(steps + 1, dtype=np.int64)
    gap = consistency.largest_gap
    return np.zeros_like(clock) if gap is None else np.maximum(clock - gap, 0)


def simulate_clocks(own_ns: Floats, consistency: Consistency) -> SimulatedRuns:
    """`own_ns` is (runs, steps, workers)."""
    runs, steps, workers = own_ns.shape
    start, end = np.empty_like(own_ns), np.empty_like(own_ns)
    needed = needed_clocks(consistency, steps)
    all_reached = np.zeros((runs, steps + 1))  # when the last worker reaches each clock
    ready = np.zeros((runs, workers))
    for clock in range(steps):
        start[:, clock] = np.maximum(ready, all_reached[:, needed[clock], None])
        ready = start[:, clock] + own_ns[:, clock]
        end[:, clock] = ready
        all_reached[:, clock + 1] = ready.max(axis=1)
    return SimulatedRuns(start_ns=start, end_ns=end)
