"""Where the typical step changed for good: seeded binary segmentation of robust block medians.

Steps are put into blocks, each with the median of its logarithms, so that stalls do not count. Many
stretches of the run are cut where the means of their two sides differ most, measured in standard
errors (block_medians.py says how large those are). The clearest cut counts, then the clearest that
is left. A cut must stand out from chance over all places that were tried, change the step by at
least 3%, and be abrupt: where a straight line fits the blocks around it better, steps drift
(trends.py). The exact step, and the interval that holds it, come from the steps themselves.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stepscope.explain.whole_run.block_medians import (
    MEDIAN_COST,
    block_medians,
    block_noise,
    spread,
    staying_power,
    step_noise,
    without_outliers,
)
from stepscope.records.whole_run import LevelChange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

_MOST_BLOCKS = 800
_SMALLEST_BLOCK = 3
_USUAL_BLOCK = 5
_SHORT_RUN = 100  # steps: blocks are the smallest ones
_FEWEST_BLOCKS = 3  # on each side of a cut
_LEAST_CHANGE = 0.03
_SURE = 1.5  # times what chance reaches in half of all runs
_LEAST_SCORE = 5.0  # in short runs the noise itself is not known well
_VISIBLE = 9.0  # standard errors at which a change must look abrupt
_CLEARLY = 10.0  # squared standard deviations that two levels fit better than a line
_MOST_CHANGES = 20
# 95% of the likelihood ratio of a place to cut: (1 - exp(-x/2))^2 = 0.95 (Hansen 2000).
_LIKELY = 7.35
_NEAR = 100  # steps on each side of a change that say which levels it lies between
_OUTLIER = 3.0  # standard deviations from which on a step says nothing about its level


class _Cut(NamedTuple):
    block: int  # the first of the new level
    score: float  # standard errors between the two sides


def find_level_changes(step_ns: Floats, numbers: Ints) -> tuple[LevelChange, ...]:
    """In the order of time; none in runs too short to tell. `numbers` are the steps'."""
    size = _block_size(len(step_ns))
    logs = np.log(np.maximum(step_ns, 1.0))
    if len(logs) < 2 * _FEWEST_BLOCKS * size:
        return ()
    blocks = block_medians(logs, size)
    one_step = step_noise(logs, blocks, size)
    noise = block_noise(blocks, size, one_step)
    blocks = without_outliers(blocks, noise)
    cuts = _move_to_best(blocks, _find_cuts(blocks, noise), noise)
    while True:
        edges = [0, *(cut * size for cut in cuts), len(logs)]
        changes = [
            _locate(logs, numbers, (before, about, after), one_step)
            for before, about, after in zip(edges, edges[1:], edges[2:], strict=False)
        ]
        if None not in changes:
            return tuple(change for change in changes if change is not None)
        cuts.pop(changes.index(None))


def typical_levels(
    step_ns: Floats, numbers: Ints, changes: tuple[LevelChange, ...], per_step: float = 0.0
) -> Floats:
    """Each step's typical time: the median of the stretch that it lies in. `per_step` is how much
    longer than the one before each step is (trends.py)."""
    drift = per_step * np.arange(len(step_ns))
    level: Floats = step_ns - drift
    for start, end in itertools.pairwise([0, *change_places(numbers, changes), len(step_ns)]):
        if end > start:
            level[start:end] = np.median(level[start:end])
    level += drift
    return level


def change_places(numbers: Ints, changes: tuple[LevelChange, ...]) -> list[int]:
    """Where each new level begins among these steps."""
    places: list[int] = np.searchsorted(numbers, [change.step for change in changes]).tolist()
    return places


def _block_size(steps: int) -> int:
    smallest = _SMALLEST_BLOCK if steps < _SHORT_RUN else _USUAL_BLOCK
    return max(smallest, math.ceil(steps / _MOST_BLOCKS))


def _find_cuts(blocks: Floats, noise: float) -> list[int]:
    """The clearest cut first, then the clearest of what it leaves on either side."""
    least = max(_LEAST_SCORE, _SURE * math.sqrt(2 * math.log(len(blocks))))

    def clear(stretches: Iterable[tuple[int, int]]) -> list[tuple[_Cut, int, int]]:
        best = ((_best_cut(blocks, start, end, noise), start, end) for start, end in stretches)
        return [cut for cut in best if cut[0].score >= least]

    candidates = clear(_seeded_stretches(len(blocks)))
    cuts: list[int] = []
    while candidates and len(cuts) < _MOST_CHANGES:
        best, start, end = max(candidates, key=lambda candidate: candidate[0].score)
        candidates.remove((best, start, end))
        if _is_abrupt(blocks, start, end, best.block, noise):
            cuts.append(best.block)
            across = [one for one in candidates if one[1] < best.block < one[2]]
            halves = {(one[1], best.block) for one in across} | {(start, best.block)}
            halves |= {(best.block, one[2]) for one in across} | {(best.block, end)}
            candidates = [one for one in candidates if one not in across] + clear(sorted(halves))
    return sorted(cuts)


def _seeded_stretches(n: int) -> Iterator[tuple[int, int]]:
    """The whole, then overlapping halves, quarters and so on: a short slow time inside a long
    run is the middle of one of them."""
    length = float(n)
    while length >= 2 * _FEWEST_BLOCKS:
        count = max(1, 2 * math.ceil(n / length) - 1)
        starts = np.linspace(0, n - length, count)
        for start in starts.tolist():
            yield math.floor(start), math.ceil(start + length)
        length /= math.sqrt(2)


def _best_cut(blocks: Floats, start: int, end: int, noise: float) -> _Cut:
    """Where the two sides' means lie most standard errors apart; a change under 3% scores 0."""
    part = blocks[start:end]
    n = len(part)
    left = np.arange(_FEWEST_BLOCKS, n - _FEWEST_BLOCKS + 1)
    if not len(left):
        return _Cut(start, 0.0)
    sums = np.cumsum(part)
    change = (sums[-1] - sums[left - 1]) / (n - left) - sums[left - 1] / left
    score = np.abs(change) / (noise * np.sqrt(1 / left + 1 / (n - left)))
    score[np.abs(np.expm1(change)) < _LEAST_CHANGE] = 0.0
    best = int(np.argmax(score))
    return _Cut(start + int(left[best]), float(score[best]))


def _is_abrupt(blocks: Floats, start: int, end: int, cut: int, noise: float) -> bool:
    """Whether two levels fit the blocks around a cut clearly better than a straight line does. So
    many blocks are looked at as make the difference visible over the noise."""
    change = abs(float(blocks[cut:end].mean() - blocks[start:cut].mean()))
    reach = max(_FEWEST_BLOCKS, math.ceil(2 * (_VISIBLE * noise / change) ** 2))
    left, right = blocks[max(start, cut - reach) : cut], blocks[cut : min(end, cut + reach)]
    levels = float(((left - left.mean()) ** 2).sum() + ((right - right.mean()) ** 2).sum())
    both = np.concatenate((left, right))
    place = np.arange(len(both)) - (len(both) - 1) / 2
    slope = float((place * both).sum() / (place**2).sum())
    line = float(((both - both.mean() - slope * place) ** 2).sum())
    jumps = abs(float(right.mean() - left.mean())) > change / 2
    return jumps and line - levels > _CLEARLY * noise**2


def _move_to_best(blocks: Floats, cuts: list[int], noise: float) -> list[int]:
    """A cut was found in some stretch; between its neighbours it may lie better. One that no
    longer stands out between them is dropped."""
    kept: list[int] = []
    for place in range(len(cuts)):
        start = kept[-1] if kept else 0
        end = cuts[place + 1] if place + 1 < len(cuts) else len(blocks)
        best = _best_cut(blocks, start, end, noise)
        if best.score >= _LEAST_SCORE:
            kept.append(best.block)
    return kept


def _locate(
    logs: Floats, numbers: Ints, edges: tuple[int, int, int], noise: float
) -> LevelChange | None:
    """The likeliest step for the change, and the interval of likely ones. None where the steps
    themselves change too little, or stay off together for so long that chance may have made it."""
    start, about, end = edges
    before, after = float(np.median(logs[start:about])), float(np.median(logs[about:end]))
    residuals = np.concatenate((logs[start:about] - before, logs[about:end] - after))
    together = staying_power(residuals, noise)
    error = MEDIAN_COST * noise * math.sqrt(together * (1 / (about - start) + 1 / (end - about)))
    too_small = abs(math.expm1(after - before)) < _LEAST_CHANGE
    if too_small or abs(after - before) < _LEAST_SCORE * error:
        return None
    # Where steps drift, only those near the change lie at its levels.
    near = max(_NEAR, 5 * _block_size(len(logs)))
    just_before = float(np.median(logs[max(start, about - near) : about]))
    just_after = float(np.median(logs[about : min(end, about + near)]))
    # Half-way to the neighbouring changes, so that changes stay in order.
    first, last = (start + about) // 2, (about + end) // 2
    noise = max(noise, spread(logs[first:about] - before), spread(logs[about:last] - after))
    cost = _cost_of_cutting(logs[first:last], just_before, just_after, noise)
    likely = np.flatnonzero(cost <= _LIKELY * together)
    best = np.argmin(cost)
    step, low, high = (
        int(numbers[min(first + int(place), len(numbers) - 1)])
        for place in (best, likely[0], likely[-1])
    )
    return LevelChange(
        step=step,
        low=low,
        high=high,
        before_ms=math.exp(before) / 1e6,
        after_ms=math.exp(after) / 1e6,
    )


def _cost_of_cutting(logs: Floats, before: float, after: float, noise: float) -> Floats:
    """For every step, how much worse than at best two levels fit if it is the first of the second
    level: squared deviations in units of the noise. A stall, far from both levels, says nothing."""
    off_before = np.minimum(np.abs(logs - before) / noise, _OUTLIER) ** 2
    off_after = np.minimum(np.abs(logs - after) / noise, _OUTLIER) ** 2
    gain = np.concatenate(([0.0], np.cumsum(off_before - off_after)))
    cost: Floats = gain - gain.min()
    return cost
