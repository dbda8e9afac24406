"""Which numbers of two rows are compared: one a run, in as many ways as they were measured.

Where both rows were taken apart (computing_and_waiting.py), the time in which other programs had
the cores is left out. They still slow what is computed, since they use the same caches: a yardstick
that is timed in turns with the step takes that out. By the clock its ratio is restless while others
use the cores; by processor time it is steadier, but may shift from one hour to another. So a change
must show in both.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING

from stepscope.bench.run_change import run_change, typical_ms, variance_of_runs
from stepscope.verify.change import POWER, Estimate
from stepscope.verify.trial_steps import without_pauses

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepscope.records.bench_result import WorkloadResult

    RunPair = tuple[Sequence[float], Sequence[float]]  # the base's runs, and those of now


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
