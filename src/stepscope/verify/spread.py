"""How uncertain a quantile of one run's steps is, given that neighbouring steps are correlated.

A quantile is as uncertain as the share of steps below it (Woodruff's interval). That share is an
average of signs, below or above, which neither tails nor outliers affect. If the quantile lies
between slow and fast spells, the signs at this run's quantile say little about those at the true
one, so signs on both sides of it are used too.

docs/records/comparison.md has the formulas; benchmarks/comparison.py tests them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.verify.correlation import correlation_times

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

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
