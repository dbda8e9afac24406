"""What is computed from the runs of a bench, and the rules that make results comparable:
mean steps, speed-ups, targets reached, how throughput scales with batch and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from stepscope.bench.results import BenchMachine, ScalingStudy, StudyPoint, WorkloadResult
from stepscope.bench.run_change import run_values
from stepscope.bench.task import BenchTask
from stepscope.bench.workload import Target
from stepscope.step.statistics import mean_interval
from stepscope.text.figures import significant
from stepscope.text.words import counted
from stepscope.verify.change import compare_value_pairs, student_interval
from stepscope.verify.spread import Floats

# Runs, not steps, are the sample: two starts of one command differ by more than their steps say. A
# claim needs five runs; the fastest and the slowest are left out. Runs of different workloads and
# of different remedies take turns, so that a slow spell of the machine meets all of them.

CLAIM_RUNS = 5  # a result that is saved to be compared has at least as many
_BUSY_SHARE = 0.1  # of the cores, that others use


class MeanStep(NamedTuple):
    """The step in milliseconds with its 95% interval."""

    ms: float
    low_ms: float
    high_ms: float


def mean_step(runs: Sequence[Floats]) -> MeanStep:
    """`runs` are the steady steps of each run; from five runs on they are trimmed."""
    if len(runs) == 1:
        low, high = mean_interval(runs[0])
        return MeanStep(float(runs[0].mean()), low, high)
    means = run_values([float(run.mean()) for run in runs])
    deviation = math.sqrt(means.squares / (means.kept * (means.kept - 1)))
    step = student_interval(means.mean, deviation, means.kept - 1)
    return MeanStep(step.value, max(0.0, step.low), step.high)


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


# Quality beside speed: whether a training reached its target, after how many steps and seconds.
#
# A remedy that makes steps faster and training worse takes longer to the target.


class TargetOutcome(NamedTuple):
    """`reached` is None where the training was shorter than the target allows."""

    reached: bool | None
    steps: int | None = None
    seconds: float | None = None


def reach_target(
    losses: Sequence[float | None], target: Target, step_ms: float | None
) -> TargetOutcome:
    """A loss that is no finite number is None. Time is of steady steps, without start-up."""
    steps = steps_to_target(losses, target)
    if steps is None:
        return TargetOutcome(False if len(losses) >= target.steps else None)
    seconds = steps * step_ms / 1e3 if step_ms is not None else None
    return TargetOutcome(True, steps, seconds)


def steps_to_target(losses: Sequence[float | None], target: Target) -> int | None:
    """The first step at which the mean of the last `target.over` losses is low enough."""
    values = [math.inf if loss is None else loss for loss in losses[: target.steps]]
    for end in range(target.over, len(values) + 1):
        if sum(values[end - target.over : end]) / target.over <= target.loss:
            return end
    return None


# Throughput of one workload against its batch and its ranks: where it saturates, how it scales.

LITTLE = 0.1  # a doubled batch that gains less has saturated the device


def find_studies(rows: Sequence[WorkloadResult]) -> dict[int, ScalingStudy]:
    """Rows that differ in batch or ranks alone make a study; its key is the place of its first
    row."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault((row.name, row.size, row.remedies), []).append(place)
    studies = {}
    for places in groups.values():
        several = sorted((rows[place] for place in places), key=_where)
        if len({_where(row) for row in several}) > 1:
            first = next(place for place in places if rows[place] is several[0])
            studies[first] = _study(several)
    return studies


def _where(row: WorkloadResult) -> tuple[int, int]:
    return row.ranks, int(row.settings.get("batch") or 0)


def _study(rows: Sequence[WorkloadResult]) -> ScalingStudy:
    points = [
        StudyPoint(
            batch=_where(row)[1],
            ranks=row.ranks,
            samples_per_s=row.samples_per_s,
            low=row.low,
            high=row.high,
            why=row.why if row.status != "measured" else None,
        )
        for row in rows
    ]
    return ScalingStudy(
        name=rows[0].name,
        size=rows[0].size,
        samples=rows[0].samples,
        remedies=rows[0].remedies,
        points=tuple(replace(point, efficiency=efficiency(point, points)) for point in points),
        saturates_at=saturation(points),
    )


def efficiency(point: StudyPoint, points: Sequence[StudyPoint]) -> float | None:
    """Throughput a rank over that on the fewest ranks with the same batch; None on those."""
    others = [
        other
        for other in points
        if other.batch == point.batch and other.ranks < point.ranks and other.samples_per_s
    ]
    if not others or point.samples_per_s is None:
        return None
    fewest = min(others, key=lambda other: other.ranks)
    assert fewest.samples_per_s
    return (point.samples_per_s / point.ranks) / (fewest.samples_per_s / fewest.ranks)


def saturation(points: Sequence[StudyPoint]) -> int | None:
    """The smallest batch, on the fewest ranks, beyond which no doubling gains 10%; None if the
    largest one that was measured still gains."""
    fewest = min((point.ranks for point in points if point.samples_per_s), default=None)
    curve = sorted(
        (point.batch, point.samples_per_s)
        for point in points
        if point.samples_per_s and point.ranks == fewest
    )
    saturated = None
    for (batch, now), (larger, then) in zip(reversed(curve[:-1]), reversed(curve[1:]), strict=True):
        gain = (then / now) ** (1 / math.log2(larger / batch)) - 1
        if gain >= LITTLE:
            break
        saturated = batch
    return saturated


def with_straight_lines(study: ScalingStudy) -> ScalingStudy:
    """Where no what-if answers: the step against the batch is a straight line through the two
    smallest batches on as many ranks, which says what larger ones should do."""
    points, filled = list(study.points), False
    for place, point in enumerate(points):
        smaller = sorted(
            (other for other in study.points if _is_measured_below(other, point)),
            key=lambda other: other.batch,
        )[:2]
        if point.predicted_samples_per_s is None and len(smaller) == 2:
            points[place], filled = _on_line(point, *smaller), True
    if not filled:
        return study
    note = "the batch study predicts along a straight line through the two smallest batches"
    return replace(study, points=tuple(points), notes=(*study.notes, note))


def _is_measured_below(other: StudyPoint, point: StudyPoint) -> bool:
    return bool(other.samples_per_s and other.ranks == point.ranks and other.batch < point.batch)


def _on_line(point: StudyPoint, first: StudyPoint, second: StudyPoint) -> StudyPoint:
    """The doubts of both measured steps add up in squares; None where they are not known."""
    weight = (point.batch - first.batch) / (second.batch - first.batch)
    step = (1 - weight) * _step_s(first, first.samples_per_s)
    step += weight * _step_s(second, second.samples_per_s)
    if step <= 0:
        return point
    samples, low, high = point.batch * point.ranks, None, None
    halves = [_half_s(other) for other in (first, second)]
    if halves[0] is not None and halves[1] is not None:
        half = math.hypot((1 - weight) * halves[0], weight * halves[1])
        low = samples / (step + half)
        high = samples / (step - half) if half < step else None
    return replace(
        point, predicted_samples_per_s=samples / step, predicted_low=low, predicted_high=high
    )


def _step_s(point: StudyPoint, samples_per_s: float | None) -> float:
    return point.batch * point.ranks / (samples_per_s or math.inf)


def _half_s(point: StudyPoint) -> float | None:
    """Half of the interval of the step's seconds."""
    if not point.low or not point.high:
        return None
    return (_step_s(point, point.low) - _step_s(point, point.high)) / 2
