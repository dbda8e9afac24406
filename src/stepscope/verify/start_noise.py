"""How much two starts of one command differ.

Every configuration that ran more than once says something about it, but a few runs each say little,
and configurations are not alike: a step that the host paces differs by more from start to start
than one that a GPU paces. So a test's own configurations count by their runs, and all others
together by as many runs as their likeness deserves (the moderated variance of Smyth, "Linear models
and empirical Bayes methods", 2004): where all scatter alike everything is pooled, where they do not
each stands for itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

_LEAST = 0.003  # standard deviation of one start: never believed to be smaller
_FIRST_GUESS = 0.03  # of one start, before anything has run twice
_FEWEST = 3  # configurations that can show how unlike they are
_MOST_FREEDOM = 1e3
_STEP = 1e-2  # of numerical derivatives


class StartNoise(msgspec.Struct, frozen=True, kw_only=True):
    """One start's deviation, as a share of the step."""

    deviation: float
    freedom: float  # degrees of freedom; 0: nothing ran twice, and the deviation is a guess


class _Scatter(NamedTuple):
    """A variance and its degrees of freedom."""

    variance: float
    freedom: float


def start_noise(
    logs: Mapping[tuple[str, ...], Sequence[float]],
    own: Collection[tuple[str, ...]] = (),
) -> StartNoise:
    """On average over `own` configurations, or of all; `logs` are repeated runs', in order."""
    by_name = {name: _scatter(values) for name, values in logs.items()}
    if not by_name:
        return StartNoise(deviation=_FIRST_GUESS, freedom=0.0)
    noise = pooled = _pooled(by_name.values())
    usual = _usual(by_name.values()) if own else None
    if usual is not None:
        known = [[by_name[name]] if name in by_name else [] for name in own]
        noise = _mean([_pooled([usual, *scatters]) for scatters in known])
    return StartNoise(
        deviation=max(_LEAST, math.sqrt(noise.variance)),
        freedom=min(noise.freedom, pooled.freedom),
    )


def _scatter(logs: Sequence[float]) -> _Scatter:
    """Only runs that follow each other are compared, so that a slow drift of the machine counts
    little (von Neumann's estimate: half the mean square of successive differences)."""
    n = len(logs)
    variance = float((np.diff(logs) ** 2).mean()) / 2
    return _Scatter(max(variance, _LEAST**2), 2 * (n - 1) ** 2 / (3 * n - 4))


def _pooled(scatters: Collection[_Scatter]) -> _Scatter:
    freedom = sum(scatter.freedom for scatter in scatters)
    squares = sum(scatter.freedom * scatter.variance for scatter in scatters)
    return _Scatter(squares / freedom, freedom)


def _mean(scatters: Sequence[_Scatter]) -> _Scatter:
    """Of independent estimates; the freedom is Satterthwaite's."""
    total = sum(scatter.variance for scatter in scatters)
    freedom = total**2 / sum(scatter.variance**2 / scatter.freedom for scatter in scatters)
    return _Scatter(total / len(scatters), freedom)


def _usual(scatters: Collection[_Scatter]) -> _Scatter | None:
    """What a configuration's scatter is like before it has run; None: all are alike."""
    if len(scatters) < _FEWEST:
        return None
    halves = np.array([scatter.freedom / 2 for scatter in scatters])
    levels = np.array(
        [
            math.log(scatter.variance) - _digamma(half) + math.log(half)
            for scatter, half in zip(scatters, halves, strict=True)
        ]
    )
    unlike = float(levels.var(ddof=1)) - float(np.mean([_trigamma(half) for half in halves]))
    if unlike <= _trigamma(_MOST_FREEDOM / 2):
        return None
    half = _where_trigamma_is(unlike)
    return _Scatter(math.exp(float(levels.mean()) + _digamma(half) - math.log(half)), 2 * half)


def _digamma(x: float) -> float:
    return (math.lgamma(x + _STEP * x) - math.lgamma(x - _STEP * x)) / (2 * _STEP * x)


def _trigamma(x: float) -> float:
    step = _STEP * x
    return (math.lgamma(x + step) - 2 * math.lgamma(x) + math.lgamma(x - step)) / step**2


def _where_trigamma_is(value: float) -> float:
    """By halving: trigamma falls."""
    low, high = 1e-3, _MOST_FREEDOM
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _trigamma(middle) > value else (low, middle)
    return low
