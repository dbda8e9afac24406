"""Steps that grow with time: the median slope between distant steps (Theil and Sen), tested by how
often later steps are longer than earlier ones (Mann and Kendall). Spikes hardly move either.

Steps are compared within one level only (level_changes.py): a change of level is no drift. Where
neighbouring blocks are slow together, the test and the interval are that much wider.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.whole_run.block_medians import block_medians, spread, staying_power
from stepscope.records.whole_run import Trend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_BLOCKS = 120
_FEWEST_BLOCKS = 12
_SURE = 3.3  # standard errors: by chance once in a thousand runs
_LEAST_GROWTH = 0.03  # over the whole run
_FEWEST_READINGS = 30
_WITH_MEMORY = 0.5  # correlation, beyond what both owe to time


def find_trend(values: Floats, cuts: Sequence[int] = ()) -> Trend | None:
    """None where values do not grow or shrink over the run, by more than chance and by 3%. `cuts`
    are the places where another level begins."""
    size = max(1, len(values) // _BLOCKS)
    blocks = block_medians(values, size)
    n = len(blocks)
    if n < _FEWEST_BLOCKS:
        return None
    level = np.searchsorted(np.asarray(cuts, np.int64), np.arange(n) * size + size // 2, "right")
    slopes, score, deviation = _compare_pairs(blocks, level)
    if not len(slopes):
        return None
    slope = float(np.median(slopes))
    rest = _without_levels(blocks - slope * np.arange(n), level)
    deviation *= math.sqrt(staying_power(rest, 10 * spread(rest)))
    start = float(np.median((blocks - slope * np.arange(n))[level == 0])) - slope / 2
    if abs(score) < _SURE * deviation or start <= 0 or _jumps(blocks, level, slope):
        return None
    growth = slope * n / start
    if abs(growth) < _LEAST_GROWTH:
        return None
    low, high = _interval(slopes, deviation)
    return Trend(growth=growth, low=low * n / start, high=high * n / start, per_step=slope / size)


def follows_memory(step_ns: Floats, allocated: Floats) -> bool | None:
    """Whether steps are longer where more memory is allocated, beyond what both owe to time. None
    where that cannot be told: memory was read too seldom, or grows as evenly as time itself."""
    known = allocated >= 0
    if known.sum() < _FEWEST_READINGS:
        return None
    time = np.flatnonzero(known).astype(np.float64)
    memory = _off_line(time, allocated[known])
    if spread(memory) < 0.02 * spread(allocated[known]):
        return None
    step = _off_line(time, step_ns[known])
    limit = 5 * spread(step)
    step = np.clip(step, -limit, limit)
    scale = math.sqrt(float((step**2).sum() * (memory**2).sum()))
    return bool(scale and float((step * memory).sum()) / scale >= _WITH_MEMORY)


def robust_slope(values: Floats) -> tuple[float, float, float]:
    """How much each value lies above the one before: the median slope, and its 95% interval."""
    size = max(1, len(values) // _BLOCKS)
    blocks = block_medians(values, size)
    level = np.zeros(len(blocks), np.intp)
    slopes, _, deviation = _compare_pairs(blocks, level)
    low, high = _interval(slopes, deviation)
    return float(np.median(slopes)) / size, low / size, high / size


def _compare_pairs(blocks: Floats, level: NDArray[np.intp]) -> tuple[Floats, float, float]:
    """Of all pairs of one level: sorted slopes, how many more rise than fall, and how far that
    number strays by chance."""
    first, second = np.triu_indices(len(blocks), 1)
    same = level[first] == level[second]
    first, second = first[same], second[same]
    rises = blocks[second] - blocks[first]
    lengths = np.bincount(level).astype(np.float64)
    variance = float((lengths * (lengths - 1) * (2 * lengths + 5)).sum()) / 18
    return np.sort(rises / (second - first)), float(np.sign(rises).sum()), math.sqrt(variance)


def _interval(slopes: Floats, deviation: float) -> tuple[float, float]:
    """95%: so many slopes on each side of the median as the number of rises strays by chance."""
    middle, half = len(slopes) / 2, 1.96 * deviation / 2
    low, high = (
        float(slopes[min(max(int(middle + side * half), 0), len(slopes) - 1)]) for side in (-1, 1)
    )
    return low, high


def _without_levels(blocks: Floats, level: NDArray[np.intp]) -> Floats:
    rest = blocks.copy()
    for one in range(int(level[-1]) + 1):
        if (level == one).any():
            rest[level == one] -= np.median(blocks[level == one])
    return rest


def _jumps(blocks: Floats, level: NDArray[np.intp], slope: float) -> bool:
    """Whether two levels fit the longest stretch better than a straight line: then it is a change
    of level that was too small or too near the end to be one for sure."""
    part = blocks[level == np.argmax(np.bincount(level))]
    n = len(part)
    rest = part - slope * np.arange(n)
    limit = 4 * spread(rest)
    part = np.clip(rest, np.median(rest) - limit, np.median(rest) + limit) + slope * np.arange(n)
    if n < 4:
        return False
    left = np.arange(2, n - 1)
    sums = np.cumsum(part)
    change = (sums[-1] - sums[left - 1]) / (n - left) - sums[left - 1] / left
    by_levels = float((change**2 * left * (n - left) / n).max())
    place = np.arange(n) - (n - 1) / 2
    by_line = float((place * part).sum() ** 2 / (place**2).sum())
    return by_levels > by_line


def _off_line(time: Floats, values: Floats) -> Floats:
    centred = time - time.mean()
    slope = float((centred * values).sum() / (centred**2).sum())
    off: Floats = values - values.mean() - slope * centred
    return off
