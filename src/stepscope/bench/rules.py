"""The rules that make results comparable, and what a bench did not keep of them.

Runs, not steps, are the sample: two starts of one command differ by more than their steps say. A
claim needs five runs; the fastest and the slowest are left out. Runs of different workloads and
of different remedies take turns, so that a slow spell of the machine meets all of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stepscope.explain.whole_run.mean_interval import mean_interval
from stepscope.records.figures import significant
from stepscope.records.words import counted
from stepscope.verify.change import compare_value_pairs
from stepscope.verify.student import student_quantile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from stepscope.bench.task import BenchTask
    from stepscope.records.bench_result import BenchMachine, WorkloadResult

    Floats = NDArray[np.float64]

CLAIM_RUNS = 5  # a result that is saved to be compared has at least as many
_BUSY_SHARE = 0.1  # of the cores, that others use
_LEVEL = 0.975


class MeanStep(NamedTuple):
    """The step in milliseconds with its 95% interval."""

    ms: float
    low_ms: float
    high_ms: float


def mean_step(runs: Sequence[Floats]) -> MeanStep:
    """`runs` are the steady steps of each run.

    From five runs on, the fastest and the slowest are left out. Their places in the interval are
    taken by the next ones (Tukey and McLaughlin): leaving them out makes it no narrower than it is.
    """
    if len(runs) == 1:
        low, high = mean_interval(runs[0])
        return MeanStep(float(runs[0].mean()), low, high)
    means = np.sort([float(run.mean()) for run in runs])
    if len(means) >= CLAIM_RUNS:
        kept = len(means) - 2
        mean = float(means[1:-1].mean())
        means = np.clip(means, means[1], means[-2])
    else:
        kept, mean = len(means), float(means.mean())
    squares = float(((means - means.mean()) ** 2).sum())
    half = student_quantile(kept - 1, _LEVEL) * math.sqrt(squares / (kept * (kept - 1)))
    return MeanStep(mean, max(0.0, mean - half), mean + half)


def speedup(
    plain_ms: Sequence[float], changed_ms: Sequence[float]
) -> tuple[float, float | None, float | None]:
    """How many times as fast the changed runs are, and the 95% interval from pairs of runs.

    The runs took turns: the first of one with the first of the other, and so on. One pair has no
    interval.
    """
    pairs = list(zip(plain_ms, changed_ms, strict=False))
    logs = [[math.log(ms) for ms in side] for side in zip(*pairs, strict=True)]
    if len(pairs) < 2:
        return math.exp(logs[0][0] - logs[1][0]), None, None
    estimate = compare_value_pairs(logs[1], logs[0], 0.0)
    return math.exp(estimate.value), math.exp(estimate.low), math.exp(estimate.high)


def in_turns(tasks: Sequence[BenchTask], runs: int) -> Iterator[tuple[int, BenchTask]]:
    """Every task once, then all again, each round the other way round: A B, B A, A B, ..."""
    for number in range(1, runs + 1):
        for task in tasks if number % 2 else reversed(tasks):
            yield number, task


def broken_rules(
    rows: Sequence[WorkloadResult], machine: BenchMachine | None, *, changed: Sequence[str] = ()
) -> tuple[str, ...]:
    """What makes these results no claim, in words; `changed` are settings of --set and --steps."""
    broken = []
    measured = [row for row in rows if row.status == "measured"]
    fewest = min((len(row.runs_ms) for row in measured), default=CLAIM_RUNS)
    if fewest < CLAIM_RUNS:
        runs = counted(fewest, "run")
        broken.append(f"only {runs} of each workload, but a claim needs {CLAIM_RUNS} (--runs)")
    if changed:
        broken.append(f"these are not the suite's own settings: {', '.join(changed)}")
    if machine is not None:
        broken += _broken_by(machine)
    broken += [
        (
            f"the speed of {'+'.join((row.name, *row.remedies))} is not a claim, because it "
            "missed its target loss"
        )
        for row in measured
        if row.target_reached is False
    ]
    return tuple(broken)


def _broken_by(machine: BenchMachine) -> Iterator[str]:
    if machine.load is not None and machine.load >= _BUSY_SHARE * machine.cores:
        yield (
            "the machine was busy at the start. Other programs used "
            f"{significant(machine.load)} of {counted(machine.cores, 'core')}"
        )
