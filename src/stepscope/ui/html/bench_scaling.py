"""Throughput against the batch and against the ranks: measured dots, predicted lines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from stepscope.records.figures import interval, percent, signed_percent, significant
from stepscope.records.words import counted, sentence
from stepscope.ui.bench.scaling_words import (
    efficiency_words,
    prediction_error,
    prediction_words,
    saturation_words,
)
from stepscope.ui.html.bench_roofline import COLORS
from stepscope.ui.html.bench_rows import short_name
from stepscope.ui.html.svg import LogAxes, circle, drawing, log_levels, path, short_tick
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.records.bench_result import ScalingStudy, StudyPoint
    from stepscope.ui.html.svg import Point

_WIDTH, _HEIGHT = 460, 290
_BOX = {"left": 56, "right": _WIDTH - 14, "top": 16, "bottom": _HEIGHT - 44}
_MOST_LEVELS = 7
_MOST_TICKS = 9
_DODGE = 5.0  # pixels between dots of neighbouring lines
_LEAST_RANGE = 6.0  # from the bottom to the top: always two levels or more
_EDGE = 1.25  # room beyond the outermost values, as a factor


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingChart:
    """Throughput against one of batch and ranks, one line for each value of the other."""

    title: str
    picture: Markup
    lines: tuple[str, ...]  # one colour each
    promised: bool
    ideal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingFigure:
    """One workload's study."""

    name: str
    summary: tuple[str, ...]  # sentences
    charts: tuple[ScalingChart, ...]
    not_measured: tuple[str, ...]


def scaling_figures(studies: Sequence[ScalingStudy]) -> list[ScalingFigure]:
    """Studies with at least two points that were measured or predicted."""
    return [_figure(study) for study in studies if len(_known(study.points)) > 1]


def _known(points: Sequence[StudyPoint]) -> list[StudyPoint]:
    return [point for point in points if _values(point)]


def _values(point: StudyPoint) -> list[float]:
    known = (
        point.samples_per_s,
        point.low,
        point.high,
        point.predicted_samples_per_s,
        point.predicted_low,
        point.predicted_high,
    )
    return [value for value in known if value is not None and value > 0]


def _figure(study: ScalingStudy) -> ScalingFigure:
    points = _known(study.points)
    charts = []
    if len({point.batch for point in points}) > 1:
        lines = _lines(points, lambda point: point.ranks)
        names = [counted(many, "rank") for many in lines]
        charts.append(
            _chart(study, "By batch", "samples a step and rank", list(lines.values()),
                   names, lambda point: point.batch, ideal=False)
        )  # fmt: skip
    if len({point.ranks for point in points}) > 1:
        lines = _lines(points, lambda point: point.batch)
        lines = {batch: line for batch, line in lines.items() if len(line) > 1}
        names = [f"batch {batch:,}" for batch in lines]
        if lines:
            charts.append(
                _chart(study, "By ranks", "ranks", list(lines.values()),
                       names, lambda point: point.ranks, ideal=True)
            )  # fmt: skip
    return ScalingFigure(
        name=_name(study),
        summary=tuple(_summary(study)),
        charts=tuple(charts),
        not_measured=tuple(_not_measured(point) for point in study.points if point.why),
    )


def _name(study: ScalingStudy) -> str:
    """gpt2, tiny, with bf16."""
    words = [short_name(study.name), one_line(study.size)]
    if study.remedies:
        words.append(f"with {one_line(' + '.join(study.remedies))}")
    return ", ".join(words)


def _summary(study: ScalingStudy) -> list[str]:
    words = (saturation_words(study), efficiency_words(study), prediction_words(study.points))
    return [sentence(line) for line in (*words, *map(one_line, study.notes)) if line]


def _lines(
    points: Sequence[StudyPoint], number: Callable[[StudyPoint], int]
) -> dict[int, list[StudyPoint]]:
    lines: dict[int, list[StudyPoint]] = {}
    for point in sorted(points, key=lambda point: (point.ranks, point.batch)):
        lines.setdefault(number(point), []).append(point)
    return dict(sorted(lines.items()))


def _not_measured(point: StudyPoint) -> str:
    place = f"batch {point.batch:,}, {counted(point.ranks, 'rank')}"
    return f"{place}: {one_line(point.why or '')}"


def _chart(
    study: ScalingStudy,
    title: str,
    x_name: str,
    lines: Sequence[Sequence[StudyPoint]],
    names: Sequence[str],
    number: Callable[[StudyPoint], int],
    *,
    ideal: bool,
) -> ScalingChart:
    axes = _axes(lines, number)
    places = sorted({number(point) for line in lines for point in line})
    shown = places if len(places) <= _MOST_TICKS else places[:: -(-len(places) // _MOST_TICKS)]
    parts = [
        *axes.grid_x(shown, lambda value: f"{value:,.0f}"),
        *axes.grid_y(
            log_levels(axes.y_low, axes.y_high, _MOST_LEVELS),
            lambda value: short_tick(significant(value)),
        ),
        *axes.frame(_HEIGHT, x_name, f"{one_line(study.samples)}/s"),
    ]
    if ideal:
        parts += [_ideal(line, axes, number) for line in lines]
    for place, line in enumerate(lines):
        aside = _DODGE * (place - (len(lines) - 1) / 2)
        marks = [*_predicted(line, axes, number), *_measured(line, axes, number, aside)]
        parts.append(f'<g class="r-{place % COLORS}">{"".join(marks)}</g>')
    return ScalingChart(
        title=title,
        picture=drawing(_WIDTH, _HEIGHT, f"{title}: {study.name}", parts),
        lines=tuple(names),
        promised=any(point.predicted_samples_per_s for line in lines for point in line),
        ideal=ideal,
    )


def _axes(lines: Sequence[Sequence[StudyPoint]], number: Callable[[StudyPoint], int]) -> LogAxes:
    points = [point for line in lines for point in line]
    across = [number(point) for point in points]
    upward = [value for point in points for value in _values(point)]
    wider = max(_EDGE, math.sqrt(_LEAST_RANGE * min(upward) / max(upward)))
    return LogAxes(
        **_BOX,
        x_low=min(across) / _EDGE,
        x_high=max(across) * _EDGE,
        y_low=min(upward) / wider,
        y_high=max(upward) * wider,
    )


def _ideal(line: Sequence[StudyPoint], axes: LogAxes, number: Callable[[StudyPoint], int]) -> str:
    """As if every rank added as much as the first ones."""
    first = next((point for point in line if point.samples_per_s), None)
    if first is None or not first.samples_per_s:
        return ""
    ends = (number(first), max(number(point) for point in line))
    points = [axes.inside(end, first.samples_per_s * end / ends[0]) for end in ends]
    return path("ideal", points)


def _predicted(
    line: Sequence[StudyPoint], axes: LogAxes, number: Callable[[StudyPoint], int]
) -> list[str]:
    """A dashed line in its band. It starts at the measured point that predictions start from."""
    middle: list[Point] = []
    low: list[Point] = []
    high: list[Point] = []
    for point in line:
        value = point.predicted_samples_per_s
        start = not middle and value is None
        rate = point.samples_per_s if start else value
        if not rate:
            continue
        x = number(point)
        middle.append(axes.inside(x, rate))
        low.append(axes.inside(x, rate if start else point.predicted_low or rate))
        high.append(axes.inside(x, rate if start else point.predicted_high or rate))
    if len(middle) < 2 or not any(point.predicted_samples_per_s for point in line):
        return []
    return [path("band", [*high, *reversed(low)], closed=True), path("promised", middle)]


def _measured(
    line: Sequence[StudyPoint],
    axes: LogAxes,
    number: Callable[[StudyPoint], int],
    aside: float,
) -> list[str]:
    """Dots joined by a line, each with its interval."""
    parts, centres = [], []
    for point in line:
        rate = point.samples_per_s
        if not rate:
            continue
        x, y = axes.inside(number(point), rate)
        x += aside
        centres.append((x, y))
        mark = circle("spot", x, y, 4.5)
        if point.low and point.high:
            ends = [axes.inside(1, end)[1] for end in (point.low, point.high)]
            mark = path("reach", [(x, ends[0]), (x, ends[1])]) + mark
        parts.append(f'<g data-tip="{escape(_tip(point, rate))}">{mark}</g>')
    joined = [path("measured", centres)] if len(centres) > 1 else []
    return joined + parts


def _tip(point: StudyPoint, rate: float) -> str:
    lines = [f"batch {point.batch:,}, {counted(point.ranks, 'rank')}", f"{significant(rate)}/s"]
    if point.low is not None and point.high is not None:
        lines[-1] += f" ({interval(point.low, point.high)})"
    promise = point.predicted_samples_per_s
    if promise:
        between = ""
        if point.predicted_low is not None and point.predicted_high is not None:
            between = f" ({interval(point.predicted_low, point.predicted_high)})"
        off = signed_percent(prediction_error(point) or 0.0)
        lines.append(f"predicted {significant(promise)}/s{between}, {off}")
    if point.efficiency is not None:
        lines.append(f"keeps {percent(point.efficiency)} of each rank's throughput")
    return "\n".join(lines)
