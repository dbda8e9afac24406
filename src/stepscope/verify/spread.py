"""Tell how uncertain a quantile of one run's steps is, given that neighbouring steps are
correlated; with Student's t.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# A quantile is as uncertain as the share of steps below it (Woodruff's interval). That share is an
# average of signs, below or above, which neither tails nor outliers affect. If the quantile lies
# between slow and fast spells, the signs at this run's quantile say little about those at the true
# one, so signs on both sides of it are used too.
#
# docs/records/comparison.md has the formulas; benchmarks/comparison.py tests them.

# Where signs are taken, as logarithms of odds from the quantile: 33%, 41%, 50%, 59%, 67%.
_AROUND = np.array([-0.7, -0.35, 0.0, 0.35, 0.7])
_MIDDLE = 2
_HALF_GRID = np.linspace(0.0, 1.0, 201)
MOST_STEPS = 50_000  # of a longer run, every so-many-th step is as good
# None divides a usual period: every 4th step waits for data, every 100th is logged.
_STRIDES = (7, 11, 13, 17, 23, 37, 53, 83, 127, 199, 307, 499, 1009)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A quantile of a run's steps, and the values it may have in an endless run."""

    value: float
    steps: int
    effective: float  # number of independent steps that would be as informative
    deviation: float  # of the share of steps below the quantile
    rounding: float = 0.0  # resolution of the clock, if it shows
    ordered: Floats
    shares: Floats  # of steps below a value; `scores`: deviations off if that is the true share
    scores: Floats
    freedoms: Floats  # degrees of freedom of the deviation there

    def at(self, score: float) -> float:
        """The value `score` deviations above the quantile."""
        share = float(np.interp(score, self.scores, self.shares))
        value = quantile(self.ordered, share)
        if self.rounding:  # the true length lies anywhere between two ticks of the clock
            unknown = self.rounding * math.erf(abs(score) / math.sqrt(2)) / 2
            off = math.hypot(value - self.value, unknown)
            return self.value + math.copysign(off, score)
        return value

    def freedom(self, score: float) -> float:
        return float(np.interp(score, self.scores, self.freedoms))


def quantile_spread(values: Floats, level: float = 0.5) -> Spread:
    """`values` are at least two steps, in the order they ran."""
    values = _thin(values)
    n = len(values)
    ordered = np.sort(values)
    odds = level / (1 - level) * np.exp(_AROUND)
    sampled = odds / (1 + odds)
    tau, freedom = correlation_times(_below(values, ordered, sampled))
    shares = np.concatenate((level * _HALF_GRID, level + (1 - level) * _HALF_GRID[1:]))
    deviations = np.sqrt(tau * level * (1 - level) / n)
    scores = (shares - level) / np.interp(shares, sampled, deviations)
    return Spread(
        value=float(np.quantile(values, level)),
        steps=n,
        effective=n / float(tau[_MIDDLE]),
        deviation=float(deviations[_MIDDLE]),
        rounding=resolution(ordered),
        ordered=ordered,
        shares=shares,
        scores=_outermost(scores),
        freedoms=np.interp(shares, sampled, freedom),
    )


def _thin(values: Floats) -> Floats:
    if len(values) <= MOST_STEPS:
        return values
    wanted = len(values) / MOST_STEPS
    return values[:: next((stride for stride in _STRIDES if stride >= wanted), _STRIDES[-1])]


def quantile(ordered: Floats, share: float) -> float:
    """The i-th of n sorted values is the quantile at (i + 1/2) / n."""
    n = len(ordered)
    place = min(max(share * n - 0.5, 0.0), n - 1.0)
    first = int(place)
    second = min(first + 1, n - 1)
    return float(ordered[first] + (place - first) * (ordered[second] - ordered[first]))


def _below(values: Floats, ordered: Floats, shares: Floats) -> Floats:
    """One row per share: 1 below its quantile, 0 above; equal values make up the share."""
    marks = np.array([quantile(ordered, float(share)) for share in shares])[:, None]
    first = np.searchsorted(ordered, marks[:, 0], "left")
    equal = np.searchsorted(ordered, marks[:, 0], "right") - first
    rest = np.clip((shares * len(values) - first) / np.maximum(equal, 1), 0.0, 1.0)
    return np.where(values < marks, 1.0, np.where(values == marks, rest[:, None], 0.0))


def _outermost(scores: Floats) -> Floats:
    """Monotonic scores: of several shares with one score, take the farthest from the quantile."""
    low = np.maximum.accumulate(np.minimum(scores, 0.0))
    high = np.minimum.accumulate(np.maximum(scores, 0.0)[::-1])[::-1]
    out: Floats = low + high
    return out


def resolution(ordered: Floats) -> float:
    """The step of the clock if most values have an equal; else 0."""
    distinct = np.unique(ordered)
    if len(distinct) > len(ordered) / 2:
        return 0.0
    if len(distinct) > 1:
        return float(np.diff(distinct).min())
    return _last_digit(float(distinct[0]))


def _last_digit(value: float) -> float:
    """The size of the last written digit."""
    text = f"{value:.9g}"
    if "e" in text:
        return 0.0
    digits = len(text.partition(".")[2])
    return 10.0**-digits


# The correlation time tau: how many steps of a run are as informative as one independent step.
#
# n values average out as n / tau independent ones do. tau is the variance of a long average over
# that of independent values, which is the spectrum at frequency zero. It is estimated from the
# slowest cosines of the values. Each cosine is one degree of freedom, so the estimate comes with
# its own uncertainty. Few cosines stay near frequency zero but are uncertain, many are certain but
# leave it: 0.2 n^(2/3) are used, and down to half of that if correlations reach far.
#
# docs/records/comparison.md has the formulas; benchmarks/comparison.py tests them.

_MOST_COSINES, _FEWEST_COSINES, _OF_EFFECTIVE = 0.2, 0.1, 0.15
_LONGEST_LAG = 0.1  # of the run
_SHORTEST = 0.2  # alternating steps are more informative than independent ones, but not by much
_ROUNDS = 3


def correlation_times(rows: Floats) -> tuple[Floats, Floats]:
    """tau of each row, and its degrees of freedom."""
    n = rows.shape[1]
    centred = rows - rows.mean(axis=1, keepdims=True)
    power = (centred**2).mean(axis=1)
    waves = np.fft.rfft(centred, 2 * n)
    lags = min(2 * max(1, int(_LONGEST_LAG * n / 2)), n)
    rough = _sum_of_correlations(np.fft.irfft(np.abs(waves) ** 2, 2 * n)[:, :lags], n)
    fewest, most = (
        min(max(share * n ** (2 / 3), least), n - 1)
        for share, least in ((_FEWEST_COSINES, 2), (_MOST_COSINES, 3))
    )
    used = np.rint(np.clip(_OF_EFFECTIVE * n / rough, fewest, most)).astype(np.int64)
    numbers = np.arange(1, int(used.max()) + 1)
    turned = waves[:, numbers] * np.exp(-0.5j * math.pi * numbers / n)
    spectrum = 2 * turned.real**2 / n
    decay = 1 / (1 + (math.pi / 2 * numbers * rough[:, None] / n) ** 2)
    last = (np.arange(len(rows)), used - 1)
    at_zero = np.cumsum(spectrum, axis=1)[last] / np.cumsum(decay, axis=1)[last]
    varies = power > 0
    tau = np.clip(at_zero / np.where(varies, power, 1.0), _SHORTEST, n / 2)
    return np.where(varies, tau, 1.0), used.astype(np.float64)


def _sum_of_correlations(products: Floats, n: int) -> Floats:
    """A rough tau of each row: one plus twice the correlations at all lags.

    Lags are added in pairs while pairs are positive and not growing (Geyer's sequence). Subtracting
    the mean of few values takes tau / n off each correlation, which is added back.
    """
    power = products[:, :1]
    correlations = products / np.where(power > 0, power, 1.0)
    longer = n / (n - np.arange(correlations.shape[1]))
    tau = np.ones((len(correlations), 1))
    for _ in range(_ROUNDS):
        lost = np.minimum(tau / n, 0.5)
        lags = (correlations * (1 - lost) + lost) * longer
        lags[:, 0] = 1.0
        pairs = np.minimum.accumulate(lags[:, 0::2] + lags[:, 1::2], axis=1)
        tau = 2 * np.maximum(pairs, 0.0).sum(axis=1, keepdims=True) - 1
        tau = np.clip(tau, 1.0, n / 2)
    out: Floats = tau[:, 0]
    return out


# Quantiles of Student's t distribution, for any number of degrees of freedom.

_MOST_FREEDOM = 500.0  # beyond, it is the normal distribution
_ANGLES = np.linspace(-math.pi / 2, math.pi / 2, 8001)


def normal_quantile(level: float) -> float:
    """Return the quantile with the six decimals of a printed table."""
    return round(NormalDist().inv_cdf(level), 6)


def student_quantile(freedom: float, level: float) -> float:
    return _student(round(min(max(freedom, 1.0), _MOST_FREEDOM), 2), level)


@lru_cache(maxsize=4096)
def _student(freedom: float, level: float) -> float:
    """Integrate the density: with t = sqrt(freedom) tan(angle), the angle's density is a power of
    its cosine."""
    density = np.maximum(np.cos(_ANGLES), 0.0) ** (freedom - 1)
    shares = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    angle = float(np.interp(level, shares / shares[-1], _ANGLES))
    return math.sqrt(freedom) * math.tan(angle)
