"""What each step should have taken, by its inputs, its level and the drift.

Stalls are judged against it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from stepscope.records.normal import NORMAL_95, median, medians
from stepscope.records.run import InputEffect, LevelChange, Trend
from stepscope.step.arrays import Floats, Int64s
from stepscope.step.statistics import block_medians, spread

# What each step should have taken, by its inputs, its level and the drift: stalls are judged
# against it, so a long batch, a new level or a slow growth makes no stalls.


class StepLevels(msgspec.Struct, frozen=True, kw_only=True):
    """`level` is each step's typical time."""

    level: Floats
    changes: tuple[LevelChange, ...]
    trend: Trend | None
    inputs: InputEffect | None


def _explain(step_ns: Floats, elements: Int64s | None) -> tuple[InputEffect | None, Floats]:
    """What inputs explain, and each step's time by them over that of the median batch."""
    if elements is None or not len(step_ns):
        return None, np.ones(len(step_ns))
    inputs, expected = explain_by_inputs(step_ns, elements.astype(np.float64))
    return inputs, expected / max(median(expected), 1.0)


def find_step_levels(
    step_ns: Floats,
    numbers: Int64s,
    elements: Int64s | None = None,
    allocated_bytes: Int64s | None = None,
) -> StepLevels:
    """Of the steady steps. Changes and drift are those that inputs do not explain."""
    inputs, expected = _explain(step_ns, elements)
    alike = step_ns / expected  # as if all batches were the median one
    changes = find_level_changes(alike, numbers)
    if inputs is not None and changes:
        # Now that the levels are known, the inputs' own part is clearer, and then the levels are.
        level = typical_levels(alike, numbers, changes)
        inputs, expected = _explain(step_ns / level * median(level), elements)
        alike = step_ns / expected
        changes = find_level_changes(alike, numbers)
    trend = find_trend(alike, change_places(numbers, changes))
    if trend is not None and allocated_bytes is not None:
        memory = follows_memory(alike, allocated_bytes.astype(np.float64))
        trend = replace(trend, follows_memory=memory)
    level = typical_levels(alike, numbers, changes, trend.per_step if trend else 0.0) * expected
    return StepLevels(level=level, changes=changes, trend=trend, inputs=inputs)


# Where the typical step changed for good: seeded binary segmentation of robust block medians.
#
# Steps are put into blocks, each with the median of its logarithms, so that stalls do not count.
# Many stretches of the run are cut where the means of their two sides differ most, measured in
# standard errors (by block medians). The clearest cut counts, then the
# clearest that is left. A cut must stand out from chance over all places that were tried, change
# the step by at least 3%, and be abrupt: where a straight line fits the blocks around it better,
# steps drift (see below). The exact step, and the interval that holds it, come from the steps
# themselves.

_MOST_BLOCKS = 800
_SMALLEST_BLOCK = 3
_USUAL_BLOCK = 5
_SHORT_RUN = 100  # steps: blocks are the smallest ones
_FEWEST_BLOCKS_PER_SIDE = 3  # on each side of a cut
_LEAST_CHANGE = 0.03
_SURE_OF_CHANGE = 1.5  # times what chance reaches in half of all runs
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


def find_level_changes(step_ns: Floats, numbers: Int64s) -> tuple[LevelChange, ...]:
    """In the order of time; none in runs too short to tell. `numbers` are the steps'."""
    size = _block_size(len(step_ns))
    logs = np.log(np.maximum(step_ns, 1.0))
    if len(logs) < 2 * _FEWEST_BLOCKS_PER_SIDE * size:
        return ()
    blocks = block_medians(logs, size)
    one_step = step_noise(logs, blocks, size)
    # Standard deviation of one block's median of logarithms, as it counts for long means:
    # the largest of what single steps, neighbouring blocks and neighbouring groups of blocks
    # show. Differences of neighbours hardly notice a change of level, and their spread does
    # not notice a steady growth at all.
    noise = one_step * MEDIAN_COST / math.sqrt(size)
    length = 1
    while len(blocks) // length - 1 >= _FEWEST_DIFFERENCES:
        means = _group_means(blocks, length)
        noise = max(noise, spread(np.diff(means)) * math.sqrt(length / 2))
        length *= 2
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
    step_ns: Floats, numbers: Int64s, changes: tuple[LevelChange, ...], per_step: float = 0.0
) -> Floats:
    """Each step's typical time: the median of the stretch that it lies in. `per_step` is how much
    longer than the one before each step is."""
    drift = per_step * np.arange(len(step_ns))
    level: Floats = step_ns - drift
    for start, end in itertools.pairwise([0, *change_places(numbers, changes), len(step_ns)]):
        if end > start:
            level[start:end] = median(level[start:end])
    level += drift
    return level


def change_places(numbers: Int64s, changes: tuple[LevelChange, ...]) -> list[int]:
    """Where each new level begins among these steps."""
    places: list[int] = np.searchsorted(numbers, [change.step for change in changes]).tolist()
    return places


def _block_size(steps: int) -> int:
    smallest = _SMALLEST_BLOCK if steps < _SHORT_RUN else _USUAL_BLOCK
    return max(smallest, math.ceil(steps / _MOST_BLOCKS))


def _find_cuts(blocks: Floats, noise: float) -> list[int]:
    """The clearest cut first, then the clearest of what it leaves on either side."""
    least = max(_LEAST_SCORE, _SURE_OF_CHANGE * math.sqrt(2 * math.log(len(blocks))))

    def clear(stretches: Iterable[tuple[int, int]]) -> list[tuple[_Cut, int, int]]:
        best = ((_best_cut(blocks, start, end, noise), start, end) for start, end in stretches)
        return [cut for cut in best if cut[0].score >= least]

    candidates = clear(_seeded_stretches(len(blocks)))
    cuts: list[int] = []
    while candidates and len(cuts) < _MOST_CHANGES:
        best, start, end = max(candidates, key=lambda candidate: candidate[0].score)
        candidates.remove((best, start, end))
        # Whether two levels fit the blocks around a cut clearly better than a straight
        # line does. So many blocks are looked at as make the difference visible over the
        # noise.
        change = abs(float(blocks[best.block : end].mean() - blocks[start : best.block].mean()))
        reach = max(_FEWEST_BLOCKS_PER_SIDE, math.ceil(2 * (_VISIBLE * noise / change) ** 2))
        left, right = (
            blocks[max(start, best.block - reach) : best.block],
            blocks[best.block : min(end, best.block + reach)],
        )
        levels = float(((left - left.mean()) ** 2).sum() + ((right - right.mean()) ** 2).sum())
        both = np.concatenate((left, right))
        place = np.arange(len(both)) - (len(both) - 1) / 2
        slope = float((place * both).sum() / (place**2).sum())
        line = float(((both - both.mean() - slope * place) ** 2).sum())
        jumps = abs(float(right.mean() - left.mean())) > change / 2
        if jumps and line - levels > _CLEARLY * noise**2:
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
    while length >= 2 * _FEWEST_BLOCKS_PER_SIDE:
        count = max(1, 2 * math.ceil(n / length) - 1)
        starts = np.linspace(0, n - length, count)
        for start in starts.tolist():
            yield math.floor(start), math.ceil(start + length)
        length /= math.sqrt(2)


def _best_cut(blocks: Floats, start: int, end: int, noise: float) -> _Cut:
    """Where the two sides' means lie most standard errors apart; a change under 3% scores 0."""
    part = blocks[start:end]
    n = len(part)
    left = np.arange(_FEWEST_BLOCKS_PER_SIDE, n - _FEWEST_BLOCKS_PER_SIDE + 1)
    if not len(left):
        return _Cut(start, 0.0)
    sums = np.cumsum(part)
    change = (sums[-1] - sums[left - 1]) / (n - left) - sums[left - 1] / left
    score = np.abs(change) / (noise * np.sqrt(1 / left + 1 / (n - left)))
    score[np.abs(np.expm1(change)) < _LEAST_CHANGE] = 0.0
    best = int(np.argmax(score))
    return _Cut(start + int(left[best]), float(score[best]))


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
    logs: Floats, numbers: Int64s, edges: tuple[int, int, int], noise: float
) -> LevelChange | None:
    """The likeliest step for the change, and the interval of likely ones. None where the steps
    themselves change too little, or stay off together for so long that chance may have made it."""
    start, about, end = edges
    before, after = median(logs[start:about]), median(logs[about:end])
    residuals = np.concatenate((logs[start:about] - before, logs[about:end] - after))
    together = staying_power(residuals, noise)
    error = MEDIAN_COST * noise * math.sqrt(together * (1 / (about - start) + 1 / (end - about)))
    too_small = abs(math.expm1(after - before)) < _LEAST_CHANGE
    if too_small or abs(after - before) < _LEAST_SCORE * error:
        return None
    # Where steps drift, only those near the change lie at its levels.
    near = max(_NEAR, 5 * _block_size(len(logs)))
    just_before = median(logs[max(start, about - near) : about])
    just_after = median(logs[about : min(end, about + near)])
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


# Steps that vary because their inputs do: time against the elements of the batch.
#
# The first line goes through the medians of steps with about as many elements, so that stalls do
# not bend it. Then steps far off the line are left out, and the line is drawn again through the
# rest. Where a curve fits clearly better, as for attention over long sequences, steps are expected
# to follow the curve.

_FEWEST = 24  # steps with known elements
_FEWEST_OFF = 5  # of them with another number of elements than the commonest
_LEAST_EXPLAINED = 0.3  # of the variance that steps have
_SURE_OF_LINE = 4.0  # standard errors
_FAR = 4.0  # standard deviations off the line: a stall
_ROUNDS = 3
_GROUPS = 32
_MOST_STEPS_FITTED = 20_000  # that the line is drawn through
_BENDS = 0.9  # a curve leaves at most this share of the line's variance


class _Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Times as a polynomial of elements over `unit`, the lowest power first."""

    unit: float
    line: Floats
    curve: Floats | None
    explained: float
    error: float  # of the line's slope


def explain_by_inputs(step_ns: Floats, elements: Floats) -> tuple[InputEffect | None, Floats]:
    """Where elements explain the step: how. And what a step with such a batch takes: the median
    where elements explain nothing or are not known (0). Steps that are long because their batch is
    long are no stalls."""
    fit = _fit(step_ns, elements)
    expected = np.full(len(step_ns), median(step_ns) if len(step_ns) else 0.0)
    if fit is None:
        return None, expected
    known = elements[elements > 0]
    slope, half = float(fit.line[1]), NORMAL_95 * fit.error
    return InputEffect(
        explained=fit.explained,
        fixed_ms=float(fit.line[0]) / 1e6,
        per_element_ms=slope / fit.unit / 1e6,
        fewest=int(known.min()),
        most=int(known.max()),
        low_ms=(slope - half) / fit.unit / 1e6,
        high_ms=(slope + half) / fit.unit / 1e6,
    ), _follow(fit, elements, expected)


def _follow(fit: _Fit, elements: Floats, median: Floats) -> Floats:
    known = elements > 0
    powers = fit.line if fit.curve is None else fit.curve
    expected = median.copy()
    expected[known] = _polynomial(powers, elements[known] / fit.unit)
    # A line may cross zero before the shortest batch.
    clipped: Floats = np.maximum(expected, 0.01 * median)
    return clipped


def _fit(step_ns: Floats, elements: Floats) -> _Fit | None:
    places = _sample(np.flatnonzero(elements > 0))
    times, counts = step_ns[places], elements[places]
    if not _vary(counts):
        return None
    unit = float(counts.max())
    x = counts / unit
    # A line through the median of each group of steps with about as many elements. Groups of
    # equal elements stay together.
    order = np.argsort(x, kind="stable")
    sorted_x, sorted_times = x[order], times[order]
    edges = np.unique(
        np.searchsorted(sorted_x, np.quantile(sorted_x, np.arange(_GROUPS) / _GROUPS))
    )
    groups = list(zip(edges.tolist(), [*edges[1:].tolist(), len(x)], strict=True))
    middle = np.array([sorted_x[start:end].mean() for start, end in groups])
    typical = np.array([median(sorted_times[start:end]) for start, end in groups])
    weight = np.array([end - start for start, end in groups], np.float64)
    if len(groups) < 2:
        line = _least_squares(x, times, 1)
    else:
        line = _least_squares(middle, typical, 1, weight)
    near = np.ones(len(x), np.bool_)
    for _ in range(_ROUNDS):
        off = times - _polynomial(line, x)
        near = np.abs(off) <= max(_FAR * spread(off), 1e-3 * median(times))
        if not _vary(counts[near]):
            return None
        line = _least_squares(x[near], times[near], 1)
    return _judge(x[near], times[near], line, unit)


def _judge(x: Floats, times: Floats, line: Floats, unit: float) -> _Fit | None:
    off = times - _polynomial(line, x)
    left, before = float(off.var()), float(times.var())
    explained = 1 - left / before if before else 0.0
    together = staying_power(off, 10 * spread(off) or 1.0)
    centred = x - x.mean()
    # Long steps vary more than short ones, so each counts with its own deviation (White 1980).
    error = math.sqrt(together * float((centred**2 * off**2).sum())) / float((centred**2).sum())
    if explained < _LEAST_EXPLAINED or line[1] <= _SURE_OF_LINE * error:
        return None
    return _Fit(
        unit=unit, line=line, curve=_curve(x, times, left), explained=explained, error=error
    )


def _curve(x: Floats, times: Floats, left: float) -> Floats | None:
    """A parabola, if it fits clearly better and rises over all of the steps."""
    if len(np.unique(x)) < 4:
        return None
    curve = _least_squares(x, times, 2)
    rises = min(curve[1] + 2 * curve[2] * x.min(), curve[1] + 2 * curve[2] * x.max()) >= 0
    better = float((times - _polynomial(curve, x)).var()) < _BENDS * left
    return curve if rises and better else None


def _sample(places: NDArray[np.intp]) -> NDArray[np.intp]:
    """At random, as every n-th step may be one that stalls, but the same at every call."""
    if len(places) <= _MOST_STEPS_FITTED:
        return places
    chosen = np.random.default_rng(0).choice(len(places), _MOST_STEPS_FITTED, replace=False)
    return places[np.sort(chosen)]


def _vary(counts: Floats) -> bool:
    if len(counts) < _FEWEST:
        return False
    return int((counts != median(counts)).sum()) >= _FEWEST_OFF


def _least_squares(x: Floats, times: Floats, degree: int, weight: Floats | None = None) -> Floats:
    root = np.sqrt(weight) if weight is not None else np.ones(len(x))
    powers = np.vander(x, degree + 1, increasing=True) * root[:, None]
    return np.asarray(np.linalg.lstsq(powers, times * root, rcond=None)[0], np.float64)


def _polynomial(powers: Floats, x: Floats) -> Floats:
    return np.asarray(np.polynomial.polynomial.polyval(x, powers), np.float64)


# Steps that grow with time: the median slope between distant steps (Theil and Sen), tested by how
# often later steps are longer than earlier ones (Mann and Kendall). Spikes hardly move either.
#
# Steps are compared within one level only: a change of level is no drift. Where
# neighbouring blocks are slow together, the test and the interval are that much wider.

_BLOCKS = 120
_FEWEST_BLOCKS_OF_TREND = 12
_SURE_OF_TREND = 3.3  # standard errors: by chance once in a thousand runs
_LEAST_GROWTH = 0.03  # over the whole run
_FEWEST_READINGS = 30
_WITH_MEMORY = 0.5  # correlation, beyond what both owe to time


def find_trend(values: Floats, cuts: Sequence[int] = ()) -> Trend | None:
    """None where values do not grow or shrink over the run, by more than chance and by 3%. `cuts`
    are the places where another level begins."""
    size = max(1, len(values) // _BLOCKS)
    blocks = block_medians(values, size)
    n = len(blocks)
    if n < _FEWEST_BLOCKS_OF_TREND:
        return None
    level = np.searchsorted(np.asarray(cuts, np.int64), np.arange(n) * size + size // 2, "right")
    slopes, score, deviation = _compare_pairs(blocks, level)
    if not len(slopes):
        return None
    slope = median(slopes)
    rest = _without_levels(blocks - slope * np.arange(n), level)
    deviation *= math.sqrt(staying_power(rest, 10 * spread(rest)))
    start = median((blocks - slope * np.arange(n))[level == 0]) - slope / 2
    if abs(score) < _SURE_OF_TREND * deviation or start <= 0 or _jumps(blocks, level, slope):
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
    return median(slopes) / size, low / size, high / size


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
    middle, half = len(slopes) / 2, NORMAL_95 * deviation / 2
    low, high = (
        float(slopes[min(max(int(middle + side * half), 0), len(slopes) - 1)]) for side in (-1, 1)
    )
    return low, high


def _without_levels(blocks: Floats, level: NDArray[np.intp]) -> Floats:
    rest = blocks.copy()
    for one in range(int(level[-1]) + 1):
        if (level == one).any():
            rest[level == one] -= median(blocks[level == one])
    return rest


def _jumps(blocks: Floats, level: NDArray[np.intp], slope: float) -> bool:
    """Whether two levels fit the longest stretch better than a straight line: then it is a change
    of level that was too small or too near the end to be one for sure."""
    part = blocks[level == np.argmax(np.bincount(level))]
    n = len(part)
    rest = part - slope * np.arange(n)
    limit = 4 * spread(rest)
    part = np.clip(rest, median(rest) - limit, median(rest) + limit) + slope * np.arange(n)
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


# Steps in blocks, each with its median, and how much such blocks vary by chance.
#
# Steps that follow each other are often slow together: another program runs for a while, a
# processor is warm. Noise that is counted step by step would be too small then, so it is measured
# at several lengths, and the largest counts.


MEDIAN_COST = 1.2533  # a median varies by so much more than a mean
_FEWEST_DIFFERENCES = 25  # so that a few changes of level do not count as noise
_MOST_STEPS_FOR_NOISE = 100_000  # that the noise of single steps is taken from
_REACH = 2  # blocks on each side that say where a block may lie
_LEAST_NOISE = 1e-4  # no clock sees less in a step


def without_outliers(blocks: Floats, noise: float) -> Floats:
    """Blocks that hold more stalls than steps, brought back to their neighbours' median."""
    if len(blocks) < 2 * _REACH + 1:
        return blocks
    padded = np.pad(blocks, _REACH, mode="edge")
    local = medians(np.lib.stride_tricks.sliding_window_view(padded, 2 * _REACH + 1), axis=1)
    clipped: Floats = np.clip(blocks, local - 3 * noise, local + 3 * noise)
    return clipped


def staying_power(residuals: Floats, noise: float) -> float:
    """How much longer than alone steps stay off together: the variance of a long mean, over that
    of independent steps. 1 for independent ones."""
    off = np.clip(residuals, -3 * noise, 3 * noise)
    off = off - off.mean()
    variance = float((off**2).sum())
    if len(off) < 3 or not variance:
        return 1.0
    # The levels are taken from the same few steps, so their correlation looks too small.
    correlation = float((off[1:] * off[:-1]).sum()) / variance
    correlation = (correlation + 3 / len(off)) / (1 - min(0.3, 4 / len(off)))
    correlation = min(max(correlation, 0.0), 0.98)
    return (1 + correlation) / (1 - correlation)


def step_noise(logs: Floats, blocks: Floats, size: int) -> float:
    """Standard deviation of one step around its block's median."""
    some = max(1, len(blocks) * size // _MOST_STEPS_FOR_NOISE)
    steps = logs[: len(blocks) * size].reshape(-1, size)[::some]
    off = (steps - blocks[::some, None]).ravel()
    # The median's own step is not off at all, so blocks of few steps look too calm.
    return max(spread(off[off != 0.0]), _LEAST_NOISE)


def _group_means(blocks: Floats, length: int) -> Floats:
    whole = len(blocks) // length * length
    means: Floats = blocks[:whole].reshape(-1, length).mean(axis=1)
    return means
