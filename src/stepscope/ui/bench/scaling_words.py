"""A scaling study in sentences, for every surface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.records.figures import percent, signed_percent, unsigned_percent
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.bench_result import ScalingStudy, StudyPoint


def saturation_words(study: ScalingStudy) -> str:
    """Empty unless several batches were measured."""
    measured = [point for point in study.points if point.samples_per_s is not None]
    if len({point.batch for point in measured}) < 2:
        return ""
    if study.saturates_at is None:
        return "no batch here saturates the device. Each doubling still gains 10% or more"
    return f"from batch {study.saturates_at:,} on, doubling it gains less than 10%"


def efficiency_words(study: ScalingStudy) -> str:
    """Of the most ranks; empty if only one number of ranks was measured."""
    known = [point for point in study.points if point.efficiency is not None]
    if not known:
        return ""
    most = max(known, key=lambda point: (point.ranks, point.batch))
    ranks = counted(most.ranks, "rank")
    return f"{ranks} keep {percent(most.efficiency or 0.0)} of each rank's throughput"


def prediction_words(points: Sequence[StudyPoint]) -> str:
    """How far predictions are from what was measured; empty without any."""
    errors = [error for point in points if (error := prediction_error(point)) is not None]
    if not errors:
        return ""
    mean, worst = sum(map(abs, errors)) / len(errors), max(errors, key=abs)
    return (
        f"{counted(len(errors), 'prediction')}: off by {unsigned_percent(mean)} on average, "
        f"{signed_percent(worst)} at worst"
    )


def prediction_error(point: StudyPoint) -> float | None:
    """Predicted over measured throughput, less one."""
    if not point.predicted_samples_per_s or not point.samples_per_s:
        return None
    return point.predicted_samples_per_s / point.samples_per_s - 1
