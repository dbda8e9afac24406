"""A scaling study in a terminal: one row for each point, with a bar and the prediction's mark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from stepscope.records.figures import interval, percent, signed_percent, significant
from stepscope.ui.bench.scaling_words import (
    efficiency_words,
    prediction_error,
    prediction_words,
    saturation_words,
)
from stepscope.ui.terminal.console import note_line
from stepscope.ui.terminal.tables import fitting_table
from stepscope.ui.words import one_line, or_dash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from stepscope.records.bench_result import ScalingStudy, StudyPoint

_BAR = 24
_MEASURED, _PREDICTED = "█", "┃"
_SPARE = ("interval", "its interval", "efficiency", "off")


def print_study(console: Console, study: ScalingStudy) -> None:
    columns = (
        *(">batch", ">ranks", f">{study.samples}/s", ">interval", ">predicted", ">its interval"),
        *(">off", ">efficiency", f"{_MEASURED} measured {_PREDICTED} predicted"),
    )
    top = max((value for point in study.points for value in _values(point)), default=0.0)
    rows = [_cells(point, top) for point in study.points]
    title = " + ".join((study.name, *study.remedies))
    console.print(
        fitting_table(f"Scaling of {title}", columns, rows, width=console.width, spare=_SPARE)
    )
    words = (saturation_words(study), efficiency_words(study), prediction_words(study.points))
    for sentence in filter(None, words):
        console.print(Text(sentence), soft_wrap=True)
    for point in study.points:
        if point.why:
            place = f"batch {point.batch:,}, ranks {point.ranks}"
            console.print(note_line(f"{place}: {one_line(point.why)}"), soft_wrap=True)
    for note in study.notes:
        console.print(note_line(one_line(note)), soft_wrap=True)


def _cells(point: StudyPoint, top: float) -> Sequence[str]:
    return (
        f"{point.batch:,}",
        str(point.ranks),
        or_dash(point.samples_per_s, significant),
        _interval(point.low, point.high),
        or_dash(point.predicted_samples_per_s, significant),
        _interval(point.predicted_low, point.predicted_high),
        or_dash(prediction_error(point), signed_percent),
        or_dash(point.efficiency, percent),
        draw_bar(point, top),
    )


def draw_bar(point: StudyPoint, top: float, width: int = _BAR) -> str:
    """Measured throughput as a bar, the predicted one as a mark in it or beyond it."""
    cells = [" "] * width
    if point.samples_per_s:
        filled = max(1, round(width * point.samples_per_s / top))
        cells[:filled] = _MEASURED * filled
    if point.predicted_samples_per_s:
        at = round(width * point.predicted_samples_per_s / top) - 1
        cells[min(width - 1, max(0, at))] = _PREDICTED
    return "".join(cells).rstrip()


def _values(point: StudyPoint) -> list[float]:
    return [value for value in (point.samples_per_s, point.predicted_samples_per_s) if value]


def _interval(low: float | None, high: float | None) -> str:
    return interval(low, high) if low is not None and high is not None else "-"
