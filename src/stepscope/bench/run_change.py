"""How far the runs of today are from saved ones, when the two never took turns, and which
numbers of two rows are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce

import numpy as np

from stepscope.bench.results import WorkloadResult
from stepscope.records.normal import median
from stepscope.verify.change import (
    POWER,
    TRIMMING_COSTS,
    Estimate,
    Odds,
    RunNoise,
    RunValues,
    compare_sides,
    pooled_noise,
    student_interval,
    widen_for_starts,
)
from stepscope.verify.spread import Floats
from stepscope.verify.steady import without_pauses

RunPair = tuple[Sequence[float], Sequence[float]]

# Runs are the sample: two starts of one command differ by more than their steps say. From five runs
# on they are trimmed, so that one disturbed run neither makes an alarm nor hides a change. Runs of
# one day share a state of the machine that their spread does not show: BETWEEN_SESSIONS stands for
# it. Five runs say little about how much runs differ, so what other workloads' runs do on the same
# machine counts too.
#
# docs/records/regressions.md has the reasons; benchmarks/bench_regressions.py tests them.

TRIMMED_FROM = 5  # runs
BETWEEN_SESSIONS = 0.005  # standard deviation of a machine's pace from one day to another
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

    `usual_variance` is how much runs of the other workloads differ.
    """
    sides = _logs(base, now)
    noise = pooled_noise(sides)
    if noise is not None and usual_variance is not None:
        known = _USUAL_COUNTS + noise.freedom
        of_all = _USUAL_COUNTS * usual_variance + noise.freedom * noise.variance
        noise = RunNoise(of_all / known, known)
    return _between_sessions(sides, noise, Odds(power, comparisons))


def run_difference(
    base: Sequence[float], now: Sequence[float], whole: float, *, comparisons: int = 1
) -> Estimate | None:
    """now - base as a share of `whole`, by the same rules; values may be zero."""
    sides = [run_values(np.asarray(values, np.float64) / whole) for values in (base, now)]
    return _between_sessions(sides, pooled_noise(sides), Odds(comparisons=comparisons))


def _between_sessions(
    sides: Sequence[RunValues], noise: RunNoise | None, odds: Odds
) -> Estimate | None:
    if noise is None:
        return None
    return widen_for_starts(compare_sides(sides, noise, odds), BETWEEN_SESSIONS, odds=odds)


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
    variance = variance_of_runs(base, now)
    if math.isinf(variance):
        return math.inf
    trims = [count >= TRIMMED_FROM for count in runs]
    kept = [count - 2 if trimmed else count for count, trimmed in zip(runs, trims, strict=True)]
    freedom = max(1.0, sum(kept) - 2 - TRIMMING_COSTS * sum(trims))
    deviation = math.sqrt(variance * sum(1 / count for count in kept))
    odds = Odds(power, comparisons)
    change = student_interval(0.0, deviation, freedom, odds)
    return widen_for_starts(change, BETWEEN_SESSIONS, odds=odds).smallest


def usual_variance(pairs: Sequence[RunPair]) -> float | None:
    """How much runs usually differ: the median over workloads; None for a single workload."""
    noises = [pooled_noise(_logs(*pair)) for pair in pairs]
    # The median of a variance is below its mean (Wilson and Hilferty).
    known = [noise.variance / (1 - 2 / (9 * noise.freedom)) ** 3 for noise in noises if noise]
    return median(known) if len(known) > 1 else None


def variance_of_runs(base: Sequence[float], now: Sequence[float]) -> float:
    """Of one run's logarithm, over both sides; infinite where no side has two runs."""
    noise = pooled_noise(_logs(base, now))
    return noise.variance if noise is not None else math.inf


def typical_ms(runs_ms: Sequence[float]) -> float:
    """The geometric mean of the runs that count: what `run_change` compares."""
    return math.exp(_logs(runs_ms)[0].mean)


def run_values(values: Sequence[float] | Floats) -> RunValues:
    """Runs as this file compares them: trimmed from five on."""
    return RunValues(np.asarray(values, np.float64), trims=len(values) >= TRIMMED_FROM)


def _logs(*sides: Sequence[float]) -> list[RunValues]:
    return [run_values(np.log(np.asarray(runs, np.float64))) for runs in sides]


# Which numbers of two rows are compared: one a run, in as many ways as they were measured.
#
# Where both rows were taken apart (steps.py), the time in which other programs had
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
        paced = (then.paced, now.paced)
        return (paced if _paced_differ_less(then, now) else plain_runs(then, now),)
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
