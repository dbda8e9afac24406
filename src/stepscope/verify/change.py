"""Estimate one change with its interval from the runs of A and B, of medians and of means,
and the smallest change to be found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.records.normal import NORMAL_95_PRECISE, median
from stepscope.records.quality import MAX_MS
from stepscope.verify.spread import (
    MOST_STEPS,
    Floats,
    Spread,
    correlation_times,
    normal_quantile,
    quantile_spread,
    resolution,
    student_quantile,
)

CONFIDENCE = 0.95
POWER = 0.8  # how often the smallest detectable change is found
FEW = 8  # with fewer steps on a side, order statistics say nothing: assume a normal distribution
_MEDIAN_OVER_MEAN = 1.2  # spread of a few values' median over that of their mean
_TAIL = (1 - CONFIDENCE) / 2
_WIDTHS_COUNT = 0.75
_ONE_OF_TWO = NORMAL_95_PRECISE / math.sqrt(2)  # deviations of each side, of two equal ones


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A difference of B from A, its interval, and the smallest one found with POWER."""

    value: float
    low: float
    high: float
    smallest: float


def median_ratio(a: Sequence[Floats], b: Sequence[Floats], *, paired: bool = False) -> Estimate:
    """ln(B / A) of the runs' median steps. A run is its steps in order."""
    return quantile_ratio(a, b, 0.5, paired=paired)


def quantile_ratio(
    a: Sequence[Floats], b: Sequence[Floats], level: float, *, paired: bool = False
) -> Estimate:
    """ln(B / A) of the runs' quantiles at one level."""
    logs = [[np.log(run) for run in side] for side in (a, b)]
    return _difference(logs[0], logs[1], level, paired=paired)


def median_difference(
    a: Sequence[Floats], b: Sequence[Floats], *, paired: bool = False
) -> Estimate:
    """B - A of the runs' medians."""
    return _difference(a, b, 0.5, paired=paired)


class Odds(NamedTuple):
    """How sure an interval is to hold, and how often the smallest change is found."""

    power: float = POWER
    comparisons: int = 1  # whose intervals all hold together in 95 of 100 cases

    @property
    def level(self) -> float:
        return 1 - _TAIL / self.comparisons


_ONE_COMPARISON = Odds()


def widen_for_starts(
    estimate: Estimate, share: float, whole: float = 1.0, odds: Odds = _ONE_COMPARISON
) -> Estimate:
    """Widen the interval by how much two starts of one command differ.

    `share` is the standard deviation of one start, as a share of `whole`: 1 for logarithms of
    ratios, else milliseconds.
    """
    deviation = share * whole * math.sqrt(2)
    reach, found = normal_quantile(odds.level), normal_quantile(odds.power)
    return Estimate(
        value=estimate.value,
        low=estimate.value - math.hypot(estimate.value - estimate.low, reach * deviation),
        high=estimate.value + math.hypot(estimate.high - estimate.value, reach * deviation),
        smallest=math.hypot(estimate.smallest, (reach + found) * deviation),
    )


def typical_step(runs: Sequence[Floats]) -> tuple[float, float, float]:
    """One side's step and its interval: the geometric mean of its runs' medians."""
    logs = [np.log(run) for run in runs]
    medians = np.array([median(run) for run in logs])
    value = float(medians.mean())
    if len(runs) == 1 and len(logs[0]) >= FEW:
        low, high = _ends(quantile_spread(logs[0]))
    else:
        draws = medians if len(runs) > 1 else logs[0]
        reach = student_quantile(len(draws) - 1, 1 - _TAIL) * float(draws.std(ddof=1))
        low, high = (value + sign * reach / math.sqrt(len(draws)) for sign in (-1, 1))
    ends = min(low, value), min(max(high, value), math.log(MAX_MS))  # no step takes longer
    return math.exp(value), math.exp(ends[0]), max(math.exp(ends[1]), math.exp(value))


def _difference(
    a: Sequence[Floats], b: Sequence[Floats], level: float, *, paired: bool
) -> Estimate:
    if len(a) == len(b) == 1:
        if min(len(a[0]), len(b[0])) < FEW:
            return _compare_few_steps(a[0], b[0])
        return _compare_two_runs(quantile_spread(a[0], level), quantile_spread(b[0], level))
    sides = [[quantile_spread(run, level) for run in side] for side in (a, b)]
    return _compare_several_runs(sides[0], sides[1], paired=paired)


def _compare_several_runs(
    a: Sequence[Spread | MeanSpread], b: Sequence[Spread | MeanSpread], *, paired: bool
) -> Estimate:
    rounding = max(run.rounding for run in (*a, *b))
    compare = compare_value_pairs if paired else _compare_run_values
    return compare([run.value for run in a], [run.value for run in b], rounding)


def _compare_two_runs(a: Spread, b: Spread) -> Estimate:
    """Move A one way and B the other, as far as both together are just likely to be off.

    An angle divides the distance: 45 degrees if both are known equally well.
    """
    # From how well each side's share of steps is known, and how far apart its steps lie there. The
    # latter is noisy if few steps lie near the quantile, and often the same on both sides: it
    # counts by three quarters, which makes the interval at most 0.5% too narrow.
    widths = [run.at(_ONE_OF_TWO) - run.at(-_ONE_OF_TWO) for run in (a, b)]
    deviations = [run.deviation for run in (a, b)]
    if min(widths) <= 0:
        widths = deviations
    known, apart = deviations[1] / deviations[0], widths[1] / widths[0]
    angle = math.atan(known * (apart / known) ** _WIDTHS_COUNT)
    ends, sizes = [], []
    for sign in (-1, 1):
        of_a, of_b = -sign * math.cos(angle), sign * math.sin(angle)
        freedom = 1 / (of_a**4 / a.freedom(2 * of_a) + of_b**4 / b.freedom(2 * of_b))  # Welch's
        reach = student_quantile(freedom, 1 - _TAIL)
        ends.append(b.at(reach * of_b) - a.at(reach * of_a))
        sizes.append(1 + student_quantile(freedom, POWER) / reach)
    value = b.value - a.value
    return Estimate(
        value=value,
        low=min(ends[0], value),
        high=max(ends[1], value),
        smallest=(ends[1] - ends[0]) / 2 * max(sizes),
    )


def _ends(run: Spread) -> tuple[float, float]:
    low, high = (
        run.at(sign * student_quantile(run.freedom(2 * sign), 1 - _TAIL)) for sign in (-1, 1)
    )
    return low, high


def _compare_few_steps(a: Floats, b: Floats) -> Estimate:
    """Student's interval with one variance for both sides."""
    noise = pooled_noise([RunValues(a), RunValues(b)])
    assert noise is not None, "two steps on each side"
    deviation = _MEDIAN_OVER_MEAN * math.sqrt(noise.variance * (1 / len(a) + 1 / len(b)))
    return student_interval(float(median(b) - median(a)), deviation, noise.freedom)


def compare_value_pairs(a: Sequence[float], b: Sequence[float], rounding: float) -> Estimate:
    """Differences within pairs count; what changes from pair to pair cancels.

    `rounding` is the clock's resolution: a coarse one makes runs equal that are not.
    """
    differences = np.array([y - x for x, y in zip(a, b, strict=True)])
    n = len(differences)
    variance = max(float(differences.var(ddof=1)), rounding**2 / 6)
    return student_interval(float(differences.mean()), math.sqrt(variance / n), n - 1)


def _compare_run_values(a: Sequence[float], b: Sequence[float], rounding: float) -> Estimate:
    """The runs are the sample; what chance does within a run is part of how they differ."""
    sides = [RunValues(np.array(side)) for side in (a, b)]
    noise = pooled_noise(sides)
    assert noise is not None, "several runs on a side"
    noise = noise._replace(variance=max(noise.variance, rounding**2 / 12))
    return compare_sides(sides, noise)


class RunValues:
    """One side's runs, each a number. Trimmed, the fastest and the slowest run do not count, and
    the next ones take their places in the interval (Yuen's test)."""

    def __init__(self, values: Floats, *, trims: bool = False) -> None:
        values = np.sort(values) if trims else values
        self.trims = trims
        self.kept = len(values) - 2 if trims else len(values)
        self.mean = float((values[1:-1] if trims else values).mean())
        if trims:
            values = np.clip(values, values[1], values[-2])
        self.squares = float(((values - values.mean()) ** 2).sum())


class RunNoise(NamedTuple):
    """The variance of one run, and its degrees of freedom."""

    variance: float
    freedom: float


# Degrees of freedom for each side whose ends are left out: with them, the far tails of Yuen's test
# are those of Student's distribution within 2%, from five normal runs on (400,000 simulations).
TRIMMING_COSTS = 0.25


def pooled_noise(sides: Sequence[RunValues]) -> RunNoise | None:
    """Return one variance for both sides; None if neither has two runs."""
    freedom = sum(side.kept - 1 for side in sides)
    if freedom < 1:
        return None
    costs = TRIMMING_COSTS * sum(side.trims for side in sides)
    return RunNoise(sum(side.squares for side in sides) / freedom, freedom - costs)


def compare_sides(
    sides: Sequence[RunValues], noise: RunNoise, odds: Odds = _ONE_COMPARISON
) -> Estimate:
    deviation = math.sqrt(noise.variance * sum(1 / side.kept for side in sides))
    return student_interval(sides[1].mean - sides[0].mean, deviation, noise.freedom, odds)


def student_interval(
    value: float, deviation: float, freedom: float, odds: Odds = _ONE_COMPARISON
) -> Estimate:
    reach = student_quantile(freedom, odds.level)
    return Estimate(
        value=value,
        low=value - reach * deviation,
        high=value + reach * deviation,
        smallest=(reach + student_quantile(freedom, odds.power)) * deviation,
    )


# How far B's mean step is from A's, and how sure that is.
#
# A mean holds the stalls that a median leaves out, so a few long steps decide how well it is known.
# Its deviation is sqrt(tau variance / n), with the correlation time tau (spread.py). A short
# run may by luck have none of the stalls that a longer one has: then its own variance is too small.
# So the variance of both sides together counts too, and the larger of the two deviations is used.

# Stalls are rare and long: a sample's variance is too small more often than too large.
_SKEWED = 1.08


class MeanSpread(msgspec.Struct, frozen=True, kw_only=True):
    """The mean of a run's values, and how sure it is."""

    value: float
    steps: int
    effective: float  # number of independent steps that would be as informative
    variance: float  # of a long average, times its steps: the values' variance times tau
    freedom: float
    rounding: float  # resolution of the clock, if it shows

    @property
    def deviation(self) -> float:
        """Return the deviation of the mean."""
        return _SKEWED * math.sqrt(self.variance / self.steps)


def mean_spread(values: Floats) -> MeanSpread:
    """`values` are at least two, in the order they ran."""
    block = 1 + (len(values) - 1) // MOST_STEPS
    if block > 1:
        return _spread_of_blocks(values, block)
    tau, freedom = 1.0, len(values) - 1.0
    if len(values) >= FEW:
        taus, freedoms = correlation_times(values[None, :])
        tau, freedom = float(taus[0]), float(freedoms[0])
    return MeanSpread(
        value=float(values.mean()),
        steps=len(values),
        effective=len(values) / tau,
        variance=tau * float(values.var(ddof=1)),
        freedom=freedom,
        rounding=resolution(np.sort(values)),
    )


def _spread_of_blocks(values: Floats, block: int) -> MeanSpread:
    """A long run by the means of so many consecutive values: their mean is as sure."""
    whole = len(values) // block * block
    spread = mean_spread(values[:whole].reshape(-1, block).mean(axis=1))
    independent = float(values.var()) / spread.variance if spread.variance else float(spread.steps)
    return replace(
        spread,
        value=float(values.mean()),
        steps=len(values),
        effective=min(float(len(values)), independent * spread.steps),
        variance=spread.variance * block,
    )


def mean_ratio(a: Sequence[Floats], b: Sequence[Floats], *, paired: bool = False) -> Estimate:
    """ln(B / A) of the runs' mean steps. A run is its steps in order."""
    spreads = [[_log_spread(run) for run in side] for side in (a, b)]
    return _compare_means(spreads[0], spreads[1], paired=paired)


def mean_difference(a: Sequence[Floats], b: Sequence[Floats], *, paired: bool = False) -> Estimate:
    """B - A of the runs' means."""
    spreads = [[mean_spread(run) for run in side] for side in (a, b)]
    return _compare_means(spreads[0], spreads[1], paired=paired)


def mean_step(runs: Sequence[Floats]) -> tuple[float, float, float]:
    """One side's step and its interval: the geometric mean of its runs' means."""
    spreads = [_log_spread(run) for run in runs]
    logs = np.array([spread.value for spread in spreads])
    value = float(logs.mean())
    if len(runs) == 1:
        reach = student_quantile(spreads[0].freedom, 1 - _TAIL) * spreads[0].deviation
    else:
        reach = student_quantile(len(runs) - 1, 1 - _TAIL) * float(logs.std(ddof=1))
        reach /= math.sqrt(len(runs))
    high = min(value + reach, math.log(MAX_MS))  # no step takes longer
    return math.exp(value), math.exp(value - reach), max(math.exp(high), math.exp(value))


def _log_spread(values: Floats) -> MeanSpread:
    """Return the spread of the mean's logarithm."""
    spread = mean_spread(values)
    return replace(
        spread,
        value=math.log(spread.value),
        variance=spread.variance / spread.value**2,
        rounding=resolution(np.sort(np.log(values))),
    )


def _compare_means(a: Sequence[MeanSpread], b: Sequence[MeanSpread], *, paired: bool) -> Estimate:
    if len(a) == len(b) == 1:
        return _compare_two_means(a[0], b[0])
    return _compare_several_runs(a, b, paired=paired)


def _compare_two_means(a: MeanSpread, b: MeanSpread) -> Estimate:
    rounding = max(a.rounding, b.rounding)
    own = a.deviation**2 + b.deviation**2
    both = (a.steps * a.variance + b.steps * b.variance) / (a.steps + b.steps)
    pooled = _SKEWED**2 * both * (1 / a.steps + 1 / b.steps)
    noisy = min(a.steps, b.steps) if own else 1  # noise makes up for a coarse clock, on average
    deviation = math.sqrt(max(own, pooled) + rounding**2 / 6 / noisy)
    shares = [run.deviation**2 / own if own else 0.5 for run in (a, b)]
    freedom = 1 / (shares[0] ** 2 / a.freedom + shares[1] ** 2 / b.freedom)  # Welch's
    return student_interval(b.value - a.value, deviation, max(1.0, freedom))
