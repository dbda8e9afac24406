"""All workloads of a bench on one roofline: what whole steps reach, under the device's peaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from stepscope.records.devices import find_device
from stepscope.records.figures import flop_rate, milliseconds, percent, significant
from stepscope.ui.html.bench_rows import distinctions, short_name
from stepscope.ui.html.roof_lines import (
    UNDER_AXES,
    around_ridges,
    draw_roofs,
    plain_level,
    roof_axes,
    roof_grid,
    shown_peaks,
)
from stepscope.ui.html.svg import circle, drawing, path, text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stepscope.records.bench_result import BenchMachine, WorkloadResult
    from stepscope.ui.html.svg import LogAxes, Point

    Rectangle = tuple[float, float, float, float]  # left, top, right, bottom

_WIDE, _NARROW = (1240, 480), (440, 440)
_LEFT = 84
_RADIUS = 5.5
_LETTER, _LINE = 6.5, 14.0  # width and height of a letter
_BESIDE = 9.0  # from a dot's centre to its name
COLORS = 6  # bench.css has so many
_ROOF_NAME = 170.0
_SLOPE_STEP = 8.0  # width of the boxes that cover the slope


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRoofline:
    """The same picture twice, for wide and for narrow windows."""

    wide: Markup
    narrow: Markup
    series: tuple[str, ...]  # remedies in words, one colour each; one only: no key is needed
    roofs: bool
    source: str
    left_out: tuple[str, ...]  # names of workloads whose FLOPs or bytes are not known


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spot:
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
    pictures = [_draw(area, spots, peaks, moved, used) for area in (_WIDE, _NARROW)]
    return BenchRoofline(
        wide=pictures[0],
        narrow=pictures[1],
        series=series,
        roofs=bool(peaks),
        source=source,
        left_out=tuple(
            short_name(result.name) for key, result in measured.items() if key not in drawn
        ),
    )


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
    return _Spot(
        key=key,
        name=name,
        color=series.index(_remedies(result)) % COLORS,
        intensity=intensity,
        reached=reached,
        tip="\n".join(lines),
    )


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
    taken = [_around(centre) for centre in places.values()]
    taken += _roof_boxes(axes, peaks, moved)
    parts = [path("way", [places[spot.key] for spot in group]) for group in _groups(spots)]
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


def _groups(spots: Sequence[_Spot]) -> list[list[_Spot]]:
    """Spots of the same name, where there are several."""
    groups: dict[str, list[_Spot]] = {}
    for spot in spots:
        groups.setdefault(spot.name, []).append(spot)
    return [group for group in groups.values() if len(group) > 1]


def _around(centre: Point) -> Rectangle:
    x, y = centre
    return x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS


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
    free = [place for place in inside if not any(_overlap(place, other) for other in taken)]
    if free:
        return free[0], False
    return (inside or places)[0], True


def _overlap(a: Rectangle, b: Rectangle) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
