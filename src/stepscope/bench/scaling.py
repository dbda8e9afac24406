"""Throughput of one workload against its batch and its ranks: where it saturates, how it scales."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.records.bench_result import ScalingStudy, StudyPoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.bench_result import WorkloadResult

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
