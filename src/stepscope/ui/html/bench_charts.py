"""Draw a bench's workloads on one roofline, and throughput against the batch and the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from markupsafe import Markup, escape

from stepscope.bench.results import BenchMachine, ScalingStudy, StudyPoint, WorkloadResult
from stepscope.records.hardware import find_device
from stepscope.text.figures import (
    flop_rate,
    interval,
    milliseconds,
    percent,
    signed_percent,
    significant,
)
from stepscope.text.words import counted, sentence
from stepscope.ui.bench.words import (
    efficiency_words,
    prediction_error,
    prediction_words,
    saturation_words,
)
from stepscope.ui.html.bench_rows import distinctions, short_name
from stepscope.ui.html.svg import (
    UNDER_AXES,
    LogAxes,
    around_ridges,
    circle,
    draw_roofs,
    drawing,
    log_levels,
    path,
    plain_level,
    roof_axes,
    roof_grid,
    short_tick,
    shown_peaks,
    text,
)
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from stepscope.ui.html.svg import Point

    Rectangle = tuple[float, float, float, float]

# All workloads of a bench on one roofline: what whole steps reach, under the device's peaks.

_WIDE, _NARROW = (1240, 480), (440, 440)
_LEFT = 84
_RADIUS = 5.5
_LETTER, _LINE = 6.5, 14.0  # width and height of a letter
_BESIDE = 9.0  # from a dot's centre to its name
COLORS = 6  # bench.css has so many
_ROOF_NAME = 170.0
_SLOPE_STEP = 8.0  # width of the boxes that cover the slope


class BenchRoofline(NamedTuple):
    """The same picture twice, for wide and for narrow windows."""

    wide: Markup
    narrow: Markup
    series: tuple[str, ...]  # remedies in words, one colour each; one only: no key is needed
    roofs: bool
    source: str
    left_out: tuple[str, ...]  # names of workloads whose FLOPs or bytes are not known


class _Spot(NamedTuple):
    key: str
    name: str
    color: int
    intensity: float
    reached: float
    tip: str


def draw_bench_roofline(
    measured: Mapping[str, WorkloadResult], machine: BenchMachine | None
) -> BenchRoofline | None:
    """None where no workload's FLOPs and bytes are known."""
    series = tuple(dict.fromkeys(_remedies(result) for result in measured.values()))
    flops, moved, source = _ceilings(machine)
    used = {dtype for result in measured.values() for dtype in result.compute_share}
    peaks = shown_peaks(flops, used & flops.keys())
    abouts = distinctions(list(measured.values()))
    spots = [
        spot
        for (key, result), about in zip(measured.items(), abouts, strict=True)
        if (spot := _spot(key, result, about, series, _roof(result, peaks, used, moved)))
    ]
    if not spots:
        return None
    drawn = {spot.key for spot in spots}
    left_out = tuple(short_name(row.name) for key, row in measured.items() if key not in drawn)
    wide, narrow = (_draw(area, spots, peaks, moved, used) for area in (_WIDE, _NARROW))
    return BenchRoofline(wide, narrow, series, bool(peaks), source, left_out)


def _ceilings(machine: BenchMachine | None) -> tuple[dict[str, float], float | None, str]:
    """As written down with the results, else from the device's data sheet."""
    if machine is None:
        return {}, None, ""
    if machine.peak_flops or machine.peak_bytes_s:
        return machine.peak_flops, machine.peak_bytes_s, machine.peak_source
    spec = find_device(machine.device) if machine.device else None
    return (spec.peaks, spec.bandwidth_bytes_s, spec.source) if spec else ({}, None, "")


def _remedies(result: WorkloadResult) -> str:
    return " + ".join(result.remedies) or "unchanged"


def _roof(
    result: WorkloadResult, peaks: Mapping[str, float], used: set[str], moved: float | None
) -> float | None:
    """The most FLOP/s that a step with these FLOPs per byte could reach, in its own dtypes."""
    mine = [peaks[dtype] for dtype in (result.compute_share or used) if dtype in peaks]
    if not mine or not moved or not result.flops or not result.bytes_moved:
        return None
    return min(max(mine), moved * result.flops / result.bytes_moved)


def _spot(
    key: str, result: WorkloadResult, about: str, series: Sequence[str], roof: float | None
) -> _Spot | None:
    if not result.flops or not result.bytes_moved or not result.step_ms:
        return None
    intensity = result.flops / result.bytes_moved
    reached = result.flops / result.step_ms * 1e3
    name = short_name(result.name)
    lines = [
        f"{name}, {about}" if about else name,
        f"{flop_rate(reached)} at {significant(intensity)} FLOPs per byte",
    ]
    if roof:
        lines.append(f"{percent(reached / roof)} of its roof, {flop_rate(roof)}")
    lines.append(f"step {milliseconds(result.step_ms)}")
    color = series.index(_remedies(result)) % COLORS
    return _Spot(key, name, color, intensity, reached, "\n".join(lines))


def _draw(
    area: tuple[int, int],
    spots: Sequence[_Spot],
    peaks: Mapping[str, float],
    moved: float | None,
    used: set[str],
) -> Markup:
    width, height = area
    axes = roof_axes(
        (_LEFT, width - 14, 14, height - UNDER_AXES),
        [*(spot.intensity for spot in spots), *around_ridges(peaks, moved)],
        [*(spot.reached for spot in spots), *peaks.values()],
    )
    parts = roof_grid(axes, plain_level, flop_rate, "FLOPs per byte", "FLOP/s reached")
    parts += draw_roofs(axes, peaks, moved, used)
    parts += _marks(spots, axes, peaks, moved)
    return drawing(width, height, "Roofline: FLOP/s of each workload against FLOPs per byte", parts)


def _marks(
    spots: Sequence[_Spot], axes: LogAxes, peaks: Mapping[str, float], moved: float | None
) -> list[str]:
    """Dots with names; a name without room is shown when its workload is pointed at.

    A workload that ran with several sets of remedies has one name, at its highest dot, and a line
    through all of them.
    """
    places = {spot.key: axes.inside(spot.intensity, spot.reached) for spot in spots}
    taken = [(x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS) for x, y in places.values()]
    taken += _roof_boxes(axes, peaks, moved)
    groups: dict[str, list[_Spot]] = {}
    for spot in spots:
        groups.setdefault(spot.name, []).append(spot)
    parts = [
        path("way", [places[spot.key] for spot in group])
        for group in groups.values()
        if len(group) > 1
    ]
    named = set()
    for spot in sorted(spots, key=lambda spot: places[spot.key][1]):
        centre = places[spot.key]
        place, crowded = _name_place(spot.name, centre, axes, taken)
        if spot.name in named or crowded:
            kind = "spot-name is-crowded"
        else:
            kind = "spot-name"
            taken.append(place)
            named.add(spot.name)
        label = text(kind, place[0], (place[1] + place[3]) / 2, spot.name)
        parts.append(
            f'<g class="r-{spot.color}" data-key="{spot.key}" data-tip="{escape(spot.tip)}">'
            f"{circle('spot', *centre, _RADIUS)}{label}</g>"
        )
    return parts


def _roof_boxes(axes: LogAxes, peaks: Mapping[str, float], moved: float | None) -> list[Rectangle]:
    """Where the roofs' own names stand, and the memory's slope with its name above it."""
    boxes = [(axes.right - _ROOF_NAME, y - 20, axes.right, y) for y in map(axes.y, peaks.values())]
    if not moved or not peaks:
        return boxes
    last = axes.x(max(peaks.values()) / moved)
    x = axes.left
    while x < last:
        intensity = axes.x_low * (axes.x_high / axes.x_low) ** (
            (x - axes.left) / (axes.right - axes.left)
        )
        y = axes.y(intensity * moved)
        boxes.append((x, y - 22, x + _SLOPE_STEP, y + 3))
        x += _SLOPE_STEP
    return boxes


def _name_place(
    name: str, centre: Point, axes: LogAxes, taken: Sequence[Rectangle]
) -> tuple[Rectangle, bool]:
    """The first free place next to the dot; True where there is none."""
    x, y = centre
    wide, half = _LETTER * len(name), _LINE / 2
    corners = [
        (x + _BESIDE, y - half),
        (x - _BESIDE - wide, y - half),
        (x + _BESIDE - 2, y - half - 9),
        (x + _BESIDE - 2, y - half + 9),
        (x - wide / 2, y - half - 13),
        (x - wide / 2, y - half + 13),
        (x - _BESIDE + 2 - wide, y - half - 9),
        (x - _BESIDE + 2 - wide, y - half + 9),
    ]
    places = [(left, top, left + wide, top + _LINE) for left, top in corners]
    inside = [
        place
        for place in places
        if axes.left + 2 <= place[0] and place[2] <= axes.right and axes.top <= place[1]
        and place[3] <= axes.bottom
    ]  # fmt: skip
    free = [
        (left, top, right, bottom)
        for left, top, right, bottom in inside
        if not any(left < r and x < right and top < low and y < bottom for x, y, r, low in taken)
    ]
    return (free or inside or places)[0], not free


# Throughput against the batch and against the ranks: measured dots, predicted lines.

_WIDTH, _HEIGHT = 460, 290
_BOX = {"left": 56, "right": _WIDTH - 14, "top": 16, "bottom": _HEIGHT - 44}
_MOST_LEVELS = 7
_MOST_TICKS = 9
_DODGE = 5.0  # pixels between dots of neighbouring lines
_LEAST_RANGE = 6.0  # from the bottom to the top: always two levels or more
_EDGE = 1.25  # room beyond the outermost values, as a factor


class ScalingChart(NamedTuple):
    """Throughput against one of batch and ranks, one line for each value of the other."""

    title: str
    picture: Markup
    lines: tuple[str, ...]  # one colour each
    promised: bool
    ideal: bool


class ScalingFigure(NamedTuple):
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
        lines = {
            counted(ranks, "rank"): line
            for ranks, line in _lines(points, lambda point: point.ranks).items()
        }
        charts.append(_chart(study, "By batch", lines, lambda point: point.batch))
    if len({point.ranks for point in points}) > 1:
        lines = {
            f"batch {batch:,}": line
            for batch, line in _lines(points, lambda point: point.batch).items()
            if len(line) > 1
        }
        if lines:
            charts.append(_chart(study, "By ranks", lines, lambda point: point.ranks))
    name = [short_name(study.name), one_line(study.size)]
    if study.remedies:
        name.append(f"with {one_line(' + '.join(study.remedies))}")
    words = (saturation_words(study), efficiency_words(study), prediction_words(study.points))
    return ScalingFigure(
        name=", ".join(name),
        summary=tuple(sentence(line) for line in (*words, *map(one_line, study.notes)) if line),
        charts=tuple(charts),
        not_measured=tuple(
            f"{_place_words(point)}: {one_line(point.why)}" for point in study.points if point.why
        ),
    )


def _place_words(point: StudyPoint) -> str:
    return f"batch {point.batch:,}, {counted(point.ranks, 'rank')}"


def _lines(
    points: Sequence[StudyPoint], number: Callable[[StudyPoint], int]
) -> dict[int, list[StudyPoint]]:
    lines: dict[int, list[StudyPoint]] = {}
    for point in sorted(points, key=lambda point: (point.ranks, point.batch)):
        lines.setdefault(number(point), []).append(point)
    return dict(sorted(lines.items()))


def _chart(
    study: ScalingStudy,
    title: str,
    named_lines: Mapping[str, Sequence[StudyPoint]],
    number: Callable[[StudyPoint], int],
) -> ScalingChart:
    by_ranks, lines = title == "By ranks", list(named_lines.values())
    axes = _axes(lines, number)
    places = sorted({number(point) for line in lines for point in line})
    shown = places if len(places) <= _MOST_TICKS else places[:: -(-len(places) // _MOST_TICKS)]
    x_name = "ranks" if by_ranks else "samples a step and rank"
    parts = [
        *axes.grid_x(shown, lambda value: f"{value:,.0f}"),
        *axes.grid_y(
            log_levels(axes.y_low, axes.y_high, _MOST_LEVELS),
            lambda value: short_tick(significant(value)),
        ),
        *axes.frame(_HEIGHT, x_name, f"{one_line(study.samples)}/s"),
    ]
    if by_ranks:
        parts += [_ideal(line, axes, number) for line in lines]
    for place, line in enumerate(lines):
        aside = _DODGE * (place - (len(lines) - 1) / 2)
        marks = [*_predicted(line, axes, number), *_measured(line, axes, number, aside)]
        parts.append(f'<g class="r-{place % COLORS}">{"".join(marks)}</g>')
    picture = drawing(_WIDTH, _HEIGHT, f"{title}: {study.name}", parts)
    promised = any(point.predicted_samples_per_s for line in lines for point in line)
    return ScalingChart(title, picture, tuple(named_lines), promised, ideal=by_ranks)


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
        rate, ends = point.predicted_samples_per_s, (point.predicted_low, point.predicted_high)
        if not middle and rate is None:
            rate, ends = point.samples_per_s, (None, None)
        if rate:
            middle.append(axes.inside(number(point), rate))
            low.append(axes.inside(number(point), ends[0] or rate))
            high.append(axes.inside(number(point), ends[1] or rate))
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
    lines = [_place_words(point), f"{significant(rate)}/s"]
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
