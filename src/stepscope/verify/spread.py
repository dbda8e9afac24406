"""How far a quantile of one run's steps may be off, given that steps follow each other.

A quantile is known as well as the share of steps below it (Woodruff's interval). Neighbouring steps
are alike, so n of them say as much as n / tau independent ones. tau is that of an autoregression
fitted to the signs, below or above the quantile, which neither tails nor outliers reach.

docs/compare.md has the formulas; benchmarks/comparison.py is what they were chosen by.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

# Equally likely values that stand for a distribution.
LEVELS = (np.arange(200) + 0.5) / 200
_MOST_FREEDOM = 500.0  # Student's distribution is the normal one from there on
_SHORTEST = 0.2  # steps that take turns may say more than independent ones, but not much more
_ANGLES = np.linspace(-math.pi / 2, math.pi / 2, 20001)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A quantile of a run's steps, and equally likely values of it in a run without end."""

    value: float
    draws: Floats
    steps: int
    effective: float  # independent steps that would say as much
    rounding: float = 0.0  # what the steps are rounded to, where that shows


def quantile_spread(values: Floats, level: float = 0.5) -> Spread:
    """Of steps in the order they ran; two at least."""
    n = len(values)
    ordered = np.sort(values)
    value = float(np.quantile(values, level))
    below = np.where(values < value, 1.0, 0.0) + np.where(values == value, level, 0.0)
    tau = correlation_time(below - level)
    freedom = max(1.0, n / max(1.0, 3 * tau - 2))
    shares = level + student(freedom) * math.sqrt(tau * level * (1 - level) / n)
    draws = np.interp(shares * n - 0.5, np.arange(n), ordered)
    step = resolution(ordered)
    if step:  # the true length lies anywhere between two marks of the clock
        draws = np.sort(draws + step * (_shuffled() - 0.5))
    return Spread(value=value, draws=draws, steps=n, effective=n / tau, rounding=step)


def correlation_time(signs: Floats) -> float:
    """How many steps say as much as one independent step would.

    The variance of a long average over that of independent values: the spectrum at zero of an
    autoregression, its order chosen by Akaike's criterion.
    """
    n = len(signs)
    centred = signs - signs.mean()
    most = min(n // 5, math.ceil(10 * math.log10(n)))
    power = float(centred @ centred)
    if not power or most < 1:
        return 1.0
    lags = np.array([centred[: n - k] @ centred[k:] for k in range(most + 1)]) / power
    order, weights, left = _autoregression(lags, n)
    tau = left / max(1 - float(weights.sum()), 0.02) ** 2 * n / (n - order - 1)
    return min(max(tau, _SHORTEST), n / 2)


def _autoregression(lags: Floats, n: int) -> tuple[int, Floats, float]:
    """Order, weights and the share of variance left, by Levinson's recursion."""
    weights = np.zeros(0)
    left, best, found = 1.0, 0.0, (0, weights, 1.0)
    for order in range(1, len(lags)):
        reflected = (lags[order] - weights @ lags[order - 1 : 0 : -1]) / left
        reflected = min(max(float(reflected), -0.999), 0.999)
        weights = np.append(weights - reflected * weights[::-1], reflected)
        left *= 1 - reflected**2
        worth = n * math.log(left) + 2 * order
        if worth < best:
            best, found = worth, (order, weights, left)
    return found


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


@lru_cache(maxsize=1)
def _shuffled() -> Floats:
    """LEVELS in an order that has nothing to do with theirs, the same every time."""
    return np.random.default_rng(0).permutation(LEVELS)


def student(freedom: float) -> Floats:
    """Student's t at LEVELS; for many degrees of freedom the normal distribution."""
    return _student_at_levels(_known(freedom))


def student_quantile(freedom: float, level: float) -> float:
    """Student's t at one level."""
    return float(_student(_known(freedom), np.array(level)))


def _known(freedom: float) -> float:
    return round(min(max(freedom, 1.0), _MOST_FREEDOM), 2)


@lru_cache(maxsize=256)
def _student_at_levels(freedom: float) -> Floats:
    return _student(freedom, LEVELS)


def _student(freedom: float, levels: Floats) -> Floats:
    """With t = sqrt(freedom) tan(angle), the angle's density is a power of its cosine."""
    density = np.maximum(np.cos(_ANGLES), 0.0) ** (freedom - 1)
    shares = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    values: Floats = math.sqrt(freedom) * np.tan(np.interp(levels, shares / shares[-1], _ANGLES))
    return values
