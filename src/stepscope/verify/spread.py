"""How far a quantile of one run's steps may be off, given that steps follow each other.

A quantile is known as well as the share of steps below it (Woodruff's interval), and that share is
known as well as the run's signs, below or above, average out. Neither tails nor outliers reach
signs. Where the quantile lies between slow and fast spells, signs at the quantile of this run say
little about the signs at the true one, so they are looked at on both sides of it too.

docs/compare.md has the formulas; benchmarks/comparison.py is what they were chosen by.
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

# Where signs are looked at, as logarithms of odds from the quantile: 33%, 41%, 50%, 59%, 67%.
_AROUND = np.array([-0.7, -0.35, 0.0, 0.35, 0.7])
_MIDDLE = 2
_HALF_GRID = np.linspace(0.0, 1.0, 201)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A quantile of a run's steps, and which values it may have in a run without end."""

    value: float
    steps: int
    effective: float  # independent steps that would say as much
    deviation: float  # of the share of steps below the quantile
    rounding: float = 0.0  # what the steps are rounded to, where that shows
    ordered: Floats
    shares: Floats  # of steps below, and how many deviations off it would be were it the true one
    scores: Floats
    freedoms: Floats  # degrees of freedom that the deviation there is known with

    def at(self, score: float) -> float:
        """The value that lies so many deviations above the quantile."""
        share = float(np.interp(score, self.scores, self.shares))
        value = quantile(self.ordered, share)
        if self.rounding:  # the true length lies anywhere between two marks of the clock
            unknown = self.rounding * math.erf(abs(score) / math.sqrt(2)) / 2
            off = math.hypot(value - self.value, unknown)
            return self.value + math.copysign(off, score)
        return value

    def freedom(self, score: float) -> float:
        return float(np.interp(score, self.scores, self.freedoms))


def quantile_spread(values: Floats, level: float = 0.5) -> Spread:
    """Of steps in the order they ran; two at least."""
    n = len(values)
    ordered = np.sort(values)
    odds = level / (1 - level) * np.exp(_AROUND)
    looked_at = odds / (1 + odds)
    tau, freedom = correlation_times(_below(values, ordered, looked_at))
    shares = np.concatenate((level * _HALF_GRID, level + (1 - level) * _HALF_GRID[1:]))
    deviations = np.sqrt(tau * level * (1 - level) / n)
    scores = (shares - level) / np.interp(shares, looked_at, deviations)
    return Spread(
        value=float(np.quantile(values, level)),
        steps=n,
        effective=n / float(tau[_MIDDLE]),
        deviation=float(deviations[_MIDDLE]),
        rounding=resolution(ordered),
        ordered=ordered,
        shares=shares,
        scores=_outermost(scores),
        freedoms=np.interp(shares, looked_at, freedom),
    )


def quantile(ordered: Floats, share: float) -> float:
    """Each of n values stands in the middle of its nth."""
    n = len(ordered)
    place = min(max(share * n - 0.5, 0.0), n - 1.0)
    first = int(place)
    second = min(first + 1, n - 1)
    return float(ordered[first] + (place - first) * (ordered[second] - ordered[first]))


def _below(values: Floats, ordered: Floats, shares: Floats) -> Floats:
    """A row for each share: 1 below its quantile, 0 above; equal ones make up the share."""
    marks = np.array([quantile(ordered, float(share)) for share in shares])[:, None]
    first = np.searchsorted(ordered, marks[:, 0], "left")
    equal = np.searchsorted(ordered, marks[:, 0], "right") - first
    rest = np.clip((shares * len(values) - first) / np.maximum(equal, 1), 0.0, 1.0)
    return np.where(values < marks, 1.0, np.where(values == marks, rest[:, None], 0.0))


def _outermost(scores: Floats) -> Floats:
    """Never falling: of several shares with one score the one farthest from the quantile."""
    low = np.maximum.accumulate(np.minimum(scores, 0.0))
    high = np.minimum.accumulate(np.maximum(scores, 0.0)[::-1])[::-1]
    out: Floats = low + high
    return out


def resolution(ordered: Floats) -> float:
    """What the values are rounded to, where most of them have an equal; else 0."""
    distinct = np.unique(ordered)
    if len(distinct) > len(ordered) / 2:
        return 0.0
    if len(distinct) > 1:
        return float(np.diff(distinct).min())
    return _last_digit(float(distinct[0]))


def _last_digit(value: float) -> float:
    """The size of the last digit that is written."""
    text = f"{value:.9g}"
    if "e" in text:
        return 0.0
    digits = len(text.partition(".")[2])
    return 10.0**-digits
