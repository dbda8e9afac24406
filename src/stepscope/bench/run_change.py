"""How far the runs of today are from saved ones, when the two never took turns.

Runs are the sample: two starts of one command differ by more than their steps say. From five runs
on, the fastest and the slowest are left out, and the next ones take their places in the interval
(Yuen's test), so that one disturbed run neither makes an alarm nor hides a change. Runs of one day
share a state of the machine that their spread does not show: BETWEEN_SESSIONS stands for it.
Five runs say little about how much runs differ, so what other workloads' runs do on the same
machine counts too.

docs/records/regressions.md has the reasons; benchmarks/bench_regressions.py tests them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from stepscope.verify.change import CONFIDENCE, POWER, Estimate
from stepscope.verify.student import student_quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.verify.spread import Floats

TRIMMED_FROM = 5  # runs
BETWEEN_SESSIONS = 0.005  # standard deviation of a machine's pace from one day to another
# Degrees of freedom for each side whose ends are left out: with them, the far tails of Yuen's test
# are those of Student's distribution within 2%, from five normal runs on (400,000 simulations).
_TRIMMING_COSTS = 0.25
# Degrees of freedom that the other workloads' runs count for. More find more, but where workloads
# are unlike, the restless ones would raise false alarms.
_USUAL_COUNTS = 4.0


def run_change(
    base: Sequence[float],
    now: Sequence[float],
    *,
    comparisons: int = 1,
    usual_variance: float | None = None,
    power: float = POWER,
) -> Estimate | None:
    """ln(now / base) of the runs' mean steps; None if no side has two runs.

    The interval is so wide that those of all `comparisons` together hold in 95 of 100 cases.
    `usual_variance` is how much runs of the other workloads differ, `power` how often the smallest
    change is found.
    """
    sides = [_logs(values) for values in (base, now)]
    return _estimate(sides, comparisons, usual_variance, power)


def run_difference(
    base: Sequence[float], now: Sequence[float], whole: float, *, comparisons: int = 1
) -> Estimate | None:
    """now - base as a share of `whole`, by the same rules; values may be zero."""
    sides = [_Runs(np.asarray(values, np.float64) / whole) for values in (base, now)]
    return _estimate(sides, comparisons, None, POWER)


def smallest_with_runs(
    base: Sequence[float],
    now: Sequence[float],
    runs: tuple[int, int],
    *,
    comparisons: int,
    power: float,
) -> float:
    """The smallest ln(now / base) found so often if the sides had so many runs that differ as much
    as these; infinite if nothing is known about that."""
    noise = _noise([_logs(base), _logs(now)])
    if noise is None:
        return math.inf
    trimmed = [count >= TRIMMED_FROM for count in runs]
    kept = [count - 2 if trims else count for count, trims in zip(runs, trimmed, strict=True)]
    freedom = max(1.0, sum(kept) - 2 - _TRIMMING_COSTS * sum(trimmed))
    chance = math.sqrt(noise[0] * sum(1 / count for count in kept))
    return sum(_reach(freedom, level, chance) for level in (_level(comparisons), power))


def _estimate(
    sides: Sequence[_Runs], comparisons: int, usual_variance: float | None, power: float
) -> Estimate | None:
    noise = _noise(sides)
    if noise is None:
        return None
    variance, freedom = noise
    if usual_variance is not None:
        known = _USUAL_COUNTS + freedom
        variance = (_USUAL_COUNTS * usual_variance + freedom * variance) / known
        freedom = known
    chance = math.sqrt(variance * sum(1 / side.kept for side in sides))
    reach = _reach(freedom, _level(comparisons), chance)
    value = sides[1].mean - sides[0].mean
    return Estimate(
        value=value,
        low=value - reach,
        high=value + reach,
        smallest=reach + _reach(freedom, power, chance),
    )


def _level(comparisons: int) -> float:
    return 1 - (1 - CONFIDENCE) / 2 / comparisons


def usual_variance(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float | None:
    """How much runs usually differ: the median over workloads; None for a single workload."""
    noises = [_noise([_logs(base), _logs(now)]) for base, now in pairs]
    # The median of a variance is below its mean (Wilson and Hilferty).
    known = [noise[0] / (1 - 2 / (9 * noise[1])) ** 3 for noise in noises if noise is not None]
    return float(np.median(known)) if len(known) > 1 else None


def variance_of_runs(base: Sequence[float], now: Sequence[float]) -> float:
    """Of one run's logarithm, over both sides; infinite where no side has two runs."""
    noise = _noise([_logs(base), _logs(now)])
    return noise[0] if noise is not None else math.inf


def _noise(sides: Sequence[_Runs]) -> tuple[float, float] | None:
    """The variance of one run, pooled over both sides, and its degrees of freedom."""
    freedom = float(sum(side.kept - 1 for side in sides))
    if freedom < 1:
        return None
    costs = sum(_TRIMMING_COSTS for side in sides if side.trimmed)
    return sum(side.squares for side in sides) / freedom, freedom - costs


def _reach(freedom: float, level: float, chance: float) -> float:
    """What runs differ by chance is estimated from few; what sessions do is taken as known."""
    sessions = math.sqrt(2) * BETWEEN_SESSIONS
    return math.hypot(
        student_quantile(freedom, level) * chance, student_quantile(math.inf, level) * sessions
    )


def typical_ms(runs_ms: Sequence[float]) -> float:
    """The geometric mean of the runs that count: what `run_change` compares."""
    return math.exp(_logs(runs_ms).mean)


def typical_value(runs: Sequence[float]) -> float:
    """The mean of the runs that count: what `run_difference` compares."""
    return _Runs(np.asarray(runs, np.float64)).mean


def _logs(runs_ms: Sequence[float]) -> _Runs:
    return _Runs(np.log(np.asarray(runs_ms, np.float64)))


class _Runs:
    """One side's runs."""

    def __init__(self, values: Floats) -> None:
        values = np.sort(values)
        self.trimmed = trims = len(values) >= TRIMMED_FROM
        self.kept = len(values) - 2 if trims else len(values)
        self.mean = float((values[1:-1] if trims else values).mean())
        shortened = np.clip(values, values[1], values[-2]) if trims else values
        self.squares = float(((shortened - shortened.mean()) ** 2).sum())
