"""How far the runs of today are from saved ones, when the two never took turns, and which
numbers of two rows are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from stepscope.verify.change import CONFIDENCE, POWER, Estimate
from stepscope.verify.spread import student_quantile
from stepscope.verify.steady import without_pauses

if TYPE_CHECKING:
    from stepscope.bench.results import WorkloadResult
    from stepscope.verify.spread import Floats

    RunPair = tuple[Sequence[float], Sequence[float]]

# How far the runs of today are from saved ones, when the two never took turns.
#
# Runs are the sample: two starts of one command differ by more than their steps say. From five runs
# on, the fastest and the slowest are left out, and the next ones take their places in the interval
# (Yuen's test), so that one disturbed run neither makes an alarm nor hides a change. Runs of one
# day share a state of the machine that their spread does not show: BETWEEN_SESSIONS stands for it.
# Five runs say little about how much runs differ, so what other workloads' runs do on the same
# machine counts too.
#
# docs/records/regressions.md has the reasons; benchmarks/bench_regressions.py tests them.

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


# Which numbers of two rows are compared: one a run, in as many ways as they were measured.
#
# Where both rows were taken apart (computing_and_waiting.py), the time in which other programs had
# the cores is left out. They still slow what is computed, since they use the same caches: a
# yardstick that is timed in turns with the step takes that out. By the clock its ratio is restless
# while others use the cores; by processor time it is steadier, but may shift from one hour to
# another. So a change must show in both.


def has_parts(then: WorkloadResult, now: WorkloadResult) -> bool:
    """Whether both sides were taken apart, with at least two runs on one of them."""
    counts = [len(row.waiting_ms) for row in (then, now)]
    return min(counts) > 0 and max(counts) > 1


def step_kinds(then: WorkloadResult, now: WorkloadResult) -> tuple[RunPair, ...]:
    """The whole step: one kind of runs, or two that must agree."""
    if not has_parts(then, now):
        return (_least_restless(then, now),)
    if not is_paced(then, now):
        return ((_own_ms(then), _own_ms(now)),)
    return (then.paced, now.paced), (_own_paced(then), _own_paced(now))


def computing_kinds(then: WorkloadResult, now: WorkloadResult) -> tuple[RunPair, ...]:
    """What the step computes, as it is and beside the yardstick, or else beside the fixed work
    before each run: a processor's clock may change that more than the step, or less."""
    plain = (then.computing_ms, now.computing_ms)
    if then.paced_computing and now.paced_computing:
        return plain, (then.paced_computing, now.paced_computing)
    if any(len(row.calibration_ms) != len(row.computing_ms) for row in (then, now)):
        return (plain,)
    before, after = (
        [ms / pace for ms, pace in zip(row.computing_ms, row.calibration_ms, strict=True)]
        for row in (then, now)
    )
    return plain, (before, after)


def kinds_change(
    kinds: Iterable[RunPair],
    *,
    comparisons: int,
    usual_variance: float | None = None,
    power: float = POWER,
) -> Estimate | None:
    """ln(now / base): the interval holds those of all kinds. None if one has too few runs."""
    changes = [
        run_change(*pair, comparisons=comparisons, usual_variance=usual_variance, power=power)
        for pair in kinds
    ]
    known = [change for change in changes if change is not None]
    return reduce(_either, known) if len(known) == len(changes) else None


def is_paced(then: WorkloadResult, now: WorkloadResult) -> bool:
    """Whether runs beside a yardstick are compared."""
    if has_parts(then, now):
        return bool(then.paced_computing and now.paced_computing)
    return _paced_differ_less(then, now)


def plain_runs(then: WorkloadResult, now: WorkloadResult) -> RunPair:
    """Each run's mean step, in which a single pause of the machine counts as an ordinary step: a
    run of a tiny workload takes a fraction of a second."""
    if len(then.steps_ms) == len(then.runs_ms) and len(now.steps_ms) == len(now.runs_ms):
        before, after = (
            [float(without_pauses(steps).mean()) for steps in side.steps_ms] for side in (then, now)
        )
        return before, after
    return then.runs_ms, now.runs_ms


def others_explain(then: WorkloadResult, now: WorkloadResult, change: Estimate) -> bool:
    """Whether other programs had the cores for so much more of the step, or less, as it changed:
    whoever uses the cores in between uses the caches too, and what is computed then takes longer.
    On two cores where others took two thirds of the step instead of a fifth, a quarter longer."""
    if not has_parts(then, now):
        return False
    more = others_share(now) - others_share(then)
    return more >= change.value if change.value > 0 else more <= change.value


def others_share(row: WorkloadResult) -> float:
    """Of the step of a row that was taken apart, in which other programs had the cores."""
    return sum(row.queue_ms) / math.fsum((*row.queue_ms, *row.computing_ms, *row.waiting_ms))


def _least_restless(then: WorkloadResult, now: WorkloadResult) -> RunPair:
    """Plain runs, or the ratios of paced ones where those agree better with each other."""
    return (then.paced, now.paced) if _paced_differ_less(then, now) else plain_runs(then, now)


def _paced_differ_less(then: WorkloadResult, now: WorkloadResult) -> bool:
    """Whether both sides have runs beside a yardstick which differ less than plain ones: some steps
    wait for memory while the yardstick computes, and a processor's clock changes one of them."""
    if not then.paced or not now.paced:
        return False
    return variance_of_runs(then.paced, now.paced) < variance_of_runs(*plain_runs(then, now))


def _own_ms(row: WorkloadResult) -> list[float]:
    return [c + w for c, w in zip(row.computing_ms, row.waiting_ms, strict=True)]


def _own_paced(row: WorkloadResult) -> list[float]:
    """Paced runs count only what is computed; waiting is added as in the plain runs."""
    whole = typical_ms(_own_ms(row)) / typical_ms(row.computing_ms)
    return [whole * ratio for ratio in row.paced_computing]


def _either(one: Estimate, other: Estimate) -> Estimate:
    """The second is the better estimate; a slow-down is found when both show it."""
    return Estimate(
        value=other.value,
        low=min(one.low, other.low),
        high=max(one.high, other.high),
        smallest=max(one.smallest + other.value - one.value, other.smallest),
    )
