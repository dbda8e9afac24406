"""A roofline's frame: logarithmic axes, the memory's slope, and a flat roof for each dtype."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from markupsafe import escape

from stepscope.records.figures import byte_rate, flop_rate
from stepscope.ui.html.svg import LogAxes, log_levels, path, short_tick, text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stepscope.ui.html.svg import Point

    Box = tuple[float, float, float, float]  # left, right, top, bottom

_SHOWN_PEAKS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
_OFFERED = ("tf32", "fp16", "bf16")
_MOST_LEVELS = 7
_DECADES = 7  # the longest axis
UNDER_AXES = 48  # room for ticks and the axis's name


def roof_axes(box: Box, x_values: Sequence[float], y_values: Sequence[float]) -> LogAxes:
    """Axes that hold all values; `box` is where they lie in the drawing."""
    left, right, top, bottom = box
    (x_low, x_high), (y_low, y_high) = _ends(x_values), _ends(y_values)
    return LogAxes(
        left=left,
        right=right,
        top=top,
        bottom=bottom,
        x_low=x_low,
        x_high=x_high,
        y_low=y_low,
        y_high=y_high,
    )


def roof_grid(
    axes: LogAxes,
    across: Callable[[float], str],
    upward: Callable[[float], str],
    x_name: str,
    y_name: str,
) -> list[str]:
    x_levels = log_levels(axes.x_low, axes.x_high, _MOST_LEVELS)
    y_levels = log_levels(axes.y_low, axes.y_high, _MOST_LEVELS)
    return [
        *axes.grid_x(x_levels, across),
        *axes.grid_y(y_levels, lambda value: short_tick(upward(value))),
        *axes.frame(axes.bottom + UNDER_AXES, x_name, y_name),
    ]


def shown_peaks(flops: Mapping[str, float], used: set[str]) -> dict[str, float]:
    """Peaks to draw: those used, and faster ones that a reader could move to."""
    known = {dtype: flops[dtype] for dtype in _SHOWN_PEAKS if dtype in flops}
    least = min((peak for dtype, peak in known.items() if dtype in used), default=0.0)
    return {
        dtype: peak
        for dtype, peak in known.items()
        if dtype in used or (dtype in _OFFERED and peak >= least)
    }


def around_ridges(peaks: Mapping[str, float], moved: float | None) -> list[float]:
    """The chart always shows part of the memory's slope and of the flat roofs."""
    ridges = [peak / moved for peak in peaks.values()] if moved else []
    return [min(ridges) / 5, max(ridges) * 2] if ridges else []


def draw_roofs(
    axes: LogAxes, peaks: Mapping[str, float], moved: float | None, used: set[str]
) -> list[str]:
    """The slope of the memory up to the highest peak; flat lines from there for each dtype."""
    parts = []
    if moved and peaks:
        top = max(peaks.values())
        foot = max(axes.x_low, axes.y_low / moved)
        parts.append(_line("roof is-memory", axes, (foot, foot * moved), (top / moved, top)))
        x = math.sqrt(foot * top / moved)
        tilt = _tilt(axes, foot, top / moved, moved)
        parts.append(
            f'<g transform="translate({axes.x(x):.1f} {axes.y(x * moved) - 7:.1f}) '
            f'rotate({tilt:.1f})"><text class="roof-name is-memory is-middle">'
            f"memory, {escape(byte_rate(moved))}</text></g>"
        )
    by_peak: dict[float, list[str]] = {}
    for dtype, peak in peaks.items():
        by_peak.setdefault(peak, []).append(dtype)
    for peak, dtypes in by_peak.items():
        name = next((dtype for dtype in dtypes if dtype in used), dtypes[-1])
        quiet = "" if name in used else " is-quiet"
        start = max(axes.x_low, peak / moved) if moved else axes.x_low
        parts.append(_line(f"roof d-{name}{quiet}", axes, (start, peak), (axes.x_high, peak)))
        label = f"{', '.join(dtypes)}  {flop_rate(peak)}"
        parts.append(text(f"roof-name d-{name}{quiet}", axes.right, axes.y(peak) - 6, label))
    return parts


def _tilt(axes: LogAxes, x0: float, x1: float, slope: float) -> float:
    """The angle of the memory's slope on the page, in degrees."""
    across = axes.x(x1) - axes.x(x0)
    return math.degrees(math.atan2(axes.y(x1 * slope) - axes.y(x0 * slope), across))


def _line(kind: str, axes: LogAxes, start: Point, end: Point) -> str:
    return path(kind, [(axes.x(x), axes.y(y)) for x, y in (start, end)])


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Both ends with some room: at least a power of ten apart, and at most `_DECADES`."""
    high = max(values) * 2.0
    low = max(min(values) / 2.0, high / 10**_DECADES)
    if high < 30 * low:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(30), middle * math.sqrt(30)
    return low, high


def plain_level(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
