"""Where the typical step changed for good: binary segmentation of robust block means.

Steps are put into blocks, each with the median of its logarithms, so that stalls do not count. The
best place to cut a stretch is where the two sides' means differ most, measured in standard errors.
The noise comes from neighbouring blocks, which a change of level hardly touches. A cut must stand
out from chance over all places that were tried, and change the step by at least 3%.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from stepscope.records.whole_run import LevelChange

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

_MOST_BLOCKS = 400
_SMALLEST_BLOCK = 5
_FEWEST_BLOCKS = 3  # on each side of a cut
_LEAST_CHANGE = 0.03
_SURE = 1.5  # times what chance reaches in half of all runs
_OF_NORMAL = 1.4826


def find_level_changes(step_ns: Floats, numbers: Ints) -> tuple[LevelChange, ...]:
    """In the order of time; none in runs too short to tell. `numbers` are the steps'."""
    size = max(_SMALLEST_BLOCK, math.ceil(len(step_ns) / _MOST_BLOCKS))
    logs = np.log(np.maximum(step_ns, 1.0))
    blocks = _block_medians(logs, size)
    noise = _noise(blocks)
    cuts = sorted(_cuts(blocks, 0, noise))
    edges = [0, *(cut for cut, _, _ in cuts), len(blocks)]
    changes = []
    for place, (cut, low, high) in enumerate(cuts, 1):
        before = float(np.exp(np.median(logs[edges[place - 1] * size : cut * size])))
        after = float(np.exp(np.median(logs[cut * size : edges[place + 1] * size])))
        exact = _refine(logs, cut * size, size, math.log(before), math.log(after))
        changes.append(
            LevelChange(
                step=int(numbers[exact]),
                low=int(numbers[min(exact, low * size)]),
                high=int(numbers[min(max(exact, high * size), len(numbers) - 1)]),
                before_ms=before / 1e6,
                after_ms=after / 1e6,
            )
        )
    return tuple(changes)


def typical_levels(step_ns: Floats, numbers: Ints, changes: tuple[LevelChange, ...]) -> Floats:
    """Each step's typical time: the median of the stretch that it lies in."""
    level = np.empty(len(step_ns))
    cuts = np.searchsorted(numbers, [change.step for change in changes]).tolist()
    edges = [0, *cuts, len(step_ns)]
    for start, end in itertools.pairwise(edges):
        if end > start:
            level[start:end] = np.median(step_ns[start:end])
    return level


def _block_medians(logs: Floats, size: int) -> Floats:
    whole = len(logs) // size * size
    medians: Floats = np.median(logs[:whole].reshape(-1, size), axis=1)
    return medians


def _noise(blocks: Floats) -> float:
    """One block's standard deviation, from the steps between neighbours."""
    if len(blocks) < 2:
        return 0.0
    return max(_OF_NORMAL * float(np.median(np.abs(np.diff(blocks)))) / math.sqrt(2), 1e-6)


def _cuts(blocks: Floats, offset: int, noise: float) -> Iterator[tuple[int, int, int]]:
    """(block that begins another level, earliest and latest it may be) of a stretch."""
    n = len(blocks)
    if n < 2 * _FEWEST_BLOCKS:
        return
    score, change = _scores(blocks, noise)
    cut = int(np.argmax(score))
    by_chance = _SURE * math.sqrt(2 * math.log(n))
    if score[cut] < by_chance or abs(math.expm1(change[cut])) < _LEAST_CHANGE:
        return
    likely = np.flatnonzero(score**2 > score[cut] ** 2 - 3.84)  # 95% of a likelihood ratio
    near = likely[np.abs(likely - cut) <= n // 4]
    at = cut + _FEWEST_BLOCKS
    yield (
        offset + at,
        offset + int(near[0]) + _FEWEST_BLOCKS,
        offset + int(near[-1]) + _FEWEST_BLOCKS,
    )
    yield from _cuts(blocks[:at], offset, noise)
    yield from _cuts(blocks[at:], offset + at, noise)


def _scores(blocks: Floats, noise: float) -> tuple[Floats, Floats]:
    """For every place to cut: how many standard errors the two sides' means lie apart, and how far
    the second lies above the first."""
    n = len(blocks)
    left = np.arange(_FEWEST_BLOCKS, n - _FEWEST_BLOCKS + 1)
    sums = np.cumsum(blocks)
    change = (sums[-1] - sums[left - 1]) / (n - left) - sums[left - 1] / left
    score = np.abs(change) / (noise * np.sqrt(1 / left + 1 / (n - left)))
    return score, change


def _refine(logs: Floats, about: int, size: int, before: float, after: float) -> int:
    """The step within a block's distance after which steps lie nearer to the new level."""
    start, end = max(0, about - size), min(len(logs), about + size)
    nearer_before = np.abs(logs[start:end] - before) < np.abs(logs[start:end] - after)
    wrong = np.concatenate(([0], np.cumsum(~nearer_before))) + np.concatenate(
        (np.cumsum(nearer_before[::-1])[::-1], [0])
    )
    return start + int(np.argmin(wrong))
