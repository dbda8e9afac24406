"""New runs from a measured one: blocks of consecutive steps, so that slow spells stay together.

A worker's step is its typical time (its own median, which stays) plus a residual. Residuals are
drawn in blocks. If the workers' steps were measured side by side, all workers take the same block:
what slows several workers at once does so in the new runs too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.worker_times import WorkerTimes

    Floats = NDArray[np.float64]
    Places = NDArray[np.int64]

_FADED = 0.1  # an autocorrelation below this counts as none
_SPELLS = 4  # a block holds so many spells of correlated steps
_LEAST_BLOCKS = 4  # that a measured series is cut into


def draw_runs(times: WorkerTimes, *, runs: int, steps: int, seed: int = 0) -> Floats:
    """Own times of new runs: (runs, steps, workers), in nanoseconds."""
    rng = np.random.default_rng(seed)
    own = np.empty((runs, steps, len(times.workers)))
    shared: Places | None = None
    for column, series in enumerate(times.own_ns):
        typical = float(np.median(series))
        if shared is None or not times.side_by_side:
            block = max(map(block_length, times.own_ns)) if times.side_by_side else None
            shared = _draw_places(rng, len(series), block or block_length(series), runs, steps)
        own[:, :, column] = typical + (series - typical)[shared]
    return own


def block_length(series: Floats) -> int:
    """Several times as long as steps stay correlated, and at least the root of their number."""
    count = len(series)
    longest = max(1, count // _LEAST_BLOCKS)
    return min(longest, max(math.isqrt(count), _SPELLS * _fading_lag(series)))


def _fading_lag(series: Floats) -> int:
    """The first lag at which the autocorrelation has faded; 0 for a constant series."""
    deviation = series - series.mean()
    if not deviation.any():
        return 0
    size = 2 * len(series)
    power = np.abs(np.fft.rfft(deviation, size)) ** 2
    correlation = np.fft.irfft(power, size)[: len(series)]
    faded = np.flatnonzero(correlation < _FADED * correlation[0])
    return int(faded[0]) if len(faded) else len(series)


def _draw_places(rng: np.random.Generator, count: int, block: int, runs: int, steps: int) -> Places:
    """Places in a series of `count` steps; a block that passes the end goes on at the start."""
    blocks = -(-steps // block)
    first = rng.integers(0, count, (runs, blocks))
    places: Places = (first[:, :, None] + np.arange(block)) % count
    return places.reshape(runs, -1)[:, :steps]
