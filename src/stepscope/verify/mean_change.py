"""How far B's mean step is from A's, and how sure that is.

A mean holds the stalls that a median leaves out, so a few long steps decide how well it is known.
Its deviation is sqrt(tau variance / n), with the correlation time tau of correlation.py. A short
run may by luck have none of the stalls that a longer one has: then its own variance is too small.
So the variance of both sides together counts too, and the larger of the two deviations is used.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.records.limits import MAX_MS
from stepscope.verify.change import (
    CONFIDENCE,
    FEW,
    Estimate,
    compare_run_values,
    compare_value_pairs,
    student_interval,
)
from stepscope.verify.correlation import correlation_times
from stepscope.verify.spread import MOST_STEPS, resolution
from stepscope.verify.student import student_quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.verify.spread import Floats

_TAIL = (1 - CONFIDENCE) / 2
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
        """Of the mean."""
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
    return _compare(spreads[0], spreads[1], paired=paired)


def mean_difference(a: Sequence[Floats], b: Sequence[Floats], *, paired: bool = False) -> Estimate:
    """B - A of the runs' means."""
    spreads = [[mean_spread(run) for run in side] for side in (a, b)]
    return _compare(spreads[0], spreads[1], paired=paired)


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
    """Of the mean's logarithm."""
    spread = mean_spread(values)
    return replace(
        spread,
        value=math.log(spread.value),
        variance=spread.variance / spread.value**2,
        rounding=resolution(np.sort(np.log(values))),
    )


def _compare(a: Sequence[MeanSpread], b: Sequence[MeanSpread], *, paired: bool) -> Estimate:
    rounding = max(run.rounding for run in (*a, *b))
    before, after = ([run.value for run in side] for side in (a, b))
    if len(a) == len(b) == 1:
        return _compare_two_runs(a[0], b[0], rounding)
    if paired:
        return compare_value_pairs(before, after, rounding)
    return compare_run_values(before, after, rounding)


def _compare_two_runs(a: MeanSpread, b: MeanSpread, rounding: float) -> Estimate:
    own = a.deviation**2 + b.deviation**2
    both = (a.steps * a.variance + b.steps * b.variance) / (a.steps + b.steps)
    pooled = _SKEWED**2 * both * (1 / a.steps + 1 / b.steps)
    noisy = min(a.steps, b.steps) if own else 1  # noise makes up for a coarse clock, on average
    deviation = math.sqrt(max(own, pooled) + rounding**2 / 6 / noisy)
    shares = [run.deviation**2 / own if own else 0.5 for run in (a, b)]
    freedom = 1 / (shares[0] ** 2 / a.freedom + shares[1] ** 2 / b.freedom)  # Welch's
    return student_interval(b.value - a.value, deviation, max(1.0, freedom))
