"""How far the runs of today are from saved ones, when the two never took turns.

Runs are the sample: two starts of one command differ by more than their steps say. From five runs
on, the fastest and the slowest are left out, and the next ones take their places in the interval
(Yuen's test), so that one disturbed run neither makes an alarm nor hides a change. Runs of one day
share a state of the machine that their spread does not show: BETWEEN_SESSIONS stands for it.

docs/bench-regressions.md has the reasons; benchmarks/bench_regressions.py tests them.
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


def run_change(
    base: Sequence[float], now: Sequence[float], comparisons: int = 1
) -> Estimate | None:
    """ln(now / base) of the runs' mean steps; None if no side has two runs.

    The interval is so wide that those of all `comparisons` together hold in 95 of 100 cases.
    """
    sides = [_Runs(values) for values in (base, now)]
    freedom = float(sum(side.kept - 1 for side in sides))
    if freedom < 1:
        return None
    variance = sum(side.squares for side in sides) / freedom
    chance = variance * sum(1 / side.kept for side in sides)
    sessions = 2 * BETWEEN_SESSIONS**2
    deviation = math.sqrt(chance + sessions)
    # Welch and Satterthwaite: the sessions' part is taken as known.
    freedom = min(freedom * (1 + sessions / chance) ** 2, 1e6) if chance else 1e6
    value = sides[1].mean - sides[0].mean
    reach = student_quantile(freedom, 1 - (1 - CONFIDENCE) / 2 / comparisons)
    return Estimate(
        value=value,
        low=value - reach * deviation,
        high=value + reach * deviation,
        smallest=(reach + student_quantile(freedom, POWER)) * deviation,
    )


def typical_ms(runs_ms: Sequence[float]) -> float:
    """The geometric mean of the runs that count: what `run_change` compares."""
    return math.exp(_Runs(runs_ms).mean)


class _Runs:
    """Logarithms of one side's runs."""

    def __init__(self, runs_ms: Sequence[float]) -> None:
        logs: Floats = np.sort(np.log(np.asarray(runs_ms, np.float64)))
        trims = len(logs) >= TRIMMED_FROM
        self.kept = len(logs) - 2 if trims else len(logs)
        self.mean = float((logs[1:-1] if trims else logs).mean())
        shortened = np.clip(logs, logs[1], logs[-2]) if trims else logs
        self.squares = float(((shortened - shortened.mean()) ** 2).sum())
