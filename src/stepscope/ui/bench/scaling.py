"""Scaling studies with predictions: the first point's run, changed by what-ifs, gives the others.

The prediction knows nothing of the other runs, so the curves can disagree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.bench.scaling import find_studies, with_straight_lines
from stepscope.errors import StepscopeError
from stepscope.records.prediction import Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.predict.whatif import Bench
    from stepscope.records.bench_result import BenchResults, ScalingStudy, StudyPoint


def with_studies(results: BenchResults, open_run: Callable[[str], Bench]) -> BenchResults:
    """Nothing changes for a bench whose rows are all different workloads."""
    studies = find_studies(results.workloads)
    predicted = (
        with_straight_lines(_predicted(study, results.workloads[place].folder, open_run))
        for place, study in studies.items()
    )
    return replace(results, scaling=tuple(predicted))


def _predicted(
    study: ScalingStudy, folder: str | None, open_run: Callable[[str], Bench]
) -> ScalingStudy:
    """As it is, with why, if the first point has no run to predict from."""
    if study.points[0].samples_per_s is None or folder is None:
        return replace(study, notes=("there is no prediction: the first point was not measured",))
    try:
        bench = open_run(folder)
    except StepscopeError as error:
        return replace(study, notes=(f"there is no prediction: {error}",))
    return predict_points(replace(study, predicted_from=folder), bench)


def predict_points(study: ScalingStudy, bench: Bench) -> ScalingStudy:
    """Every point from the first one."""
    first, *others = study.points
    points = [first]
    notes: list[str] = []
    for point in others:
        prediction = bench.predict(_changes(first, point))
        if prediction.refused:
            notes += prediction.refused
            points.append(point)
            continue
        base = (first.samples_per_s or 0.0) * prediction.samples_factor
        points.append(
            replace(
                point,
                predicted_samples_per_s=base * prediction.speedup,
                predicted_low=base * prediction.speedup_low,
                predicted_high=base * prediction.speedup_high,
            )
        )
    return replace(study, points=tuple(points), notes=tuple(dict.fromkeys(notes)))


def _changes(first: StudyPoint, point: StudyPoint) -> Sequence[Setting]:
    changes = []
    if point.batch != first.batch:
        changes.append(Setting(name="batch", value=f"x{point.batch / first.batch:g}"))
    if point.ranks != first.ranks:
        changes.append(Setting(name="workers", value=str(point.ranks)))
    return changes
