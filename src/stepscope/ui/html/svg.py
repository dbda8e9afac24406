"""Draw the pieces that charts share as SVG: lines, text, axes, ticks, and a roofline's frame.

Text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from stepscope.text.figures import byte_rate, flop_rate

if TYPE_CHECKING:
    Point = tuple[float, float]
    Place = float | str
    Box = tuple[float, float, float, float]


def drawing(
    width: float, height: float, title: str, parts: Iterable[str], *, memory: str = ""
) -> Markup:
    """A chart that scales with its width; `memory` is for memory.js."""
    extra = f' data-memory="{escape(memory)}"' if memory else ""
    return Markup(
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}"{extra}>'
        f"{''.join(parts)}</svg>"
    )


def text(kind: str, x: Place, y: float, words: str) -> str:
    return f'<text{_class(kind)} x="{_place(x)}" y="{_place(y)}">{escape(words)}</text>'


def path(kind: str, points: Sequence[Point], *, closed: bool = False, title: str = "") -> str:
    end = f">{_title(title)}</path>" if title else "/>"
    return f'<path{_class(kind)} d="{joined(points)}{"Z" if closed else ""}"{end}'


def line(kind: str, x1: Place, x2: Place, y1: float, y2: float) -> str:
    """For charts that place by percentages, where a path cannot."""
    return (
        f'<line{_class(kind)} x1="{_place(x1)}" x2="{_place(x2)}" '
        f'y1="{_place(y1)}" y2="{_place(y2)}"/>'
    )


def rect(
    kind: str,
    x: Place,
    y: float,
    width: Place,
    height: float,
    *,
    rx: float = 0,
    style: str = "",
    title: str = "",
) -> str:
    look = (f' rx="{rx:g}"' if rx else "") + (f' style="{style}"' if style else "")
    end = f">{_title(title)}</rect>" if title else "/>"
    return (
        f'<rect{_class(kind)} x="{_place(x)}" y="{_place(y)}" width="{_place(width)}" '
        f'height="{_place(height)}"{look}{end}'
    )


def circle(kind: str, x: Place, y: float, radius: float, *, title: str = "") -> str:
    end = f">{_title(title)}</circle>" if title else "/>"
    return f'<circle{_class(kind)} cx="{_place(x)}" cy="{_place(y)}" r="{radius:g}"{end}'


def joined(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{_place(x)} {_place(y)}" for x, y in points)


def _place(at: Place) -> str:
    return at if isinstance(at, str) else f"{at:.1f}".removesuffix(".0")


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _title(words: str) -> str:
    return f"<title>{escape(words)}</title>"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogAxes:
    """Two logarithmic axes: the box they span, and the values at its edges."""

    left: float
    right: float
    top: float
    bottom: float
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        share = math.log(value / self.x_low) / math.log(self.x_high / self.x_low)
        return self.left + (self.right - self.left) * share

    def y(self, value: float) -> float:
        share = math.log(value / self.y_low) / math.log(self.y_high / self.y_low)
        return self.bottom - (self.bottom - self.top) * share

    def inside(self, x: float, y: float) -> Point:
        """What lies off the axes sits on their edge."""
        return (
            min(max(self.x(x), self.left), self.right),
            min(max(self.y(y), self.top), self.bottom),
        )

    def grid_x(self, values: Iterable[float], words: Callable[[float], str]) -> list[str]:
        parts = []
        for value in values:
            x = self.x(value)
            parts.append(path("grid", [(x, self.top), (x, self.bottom)]))
            parts.append(text("tick is-middle", x, self.bottom + 18, words(value)))
        return parts

    def grid_y(self, values: Iterable[float], words: Callable[[float], str]) -> list[str]:
        parts = []
        for value in values:
            y = self.y(value)
            parts.append(path("grid", [(self.left, y), (self.right, y)]))
            parts.append(text("level", self.left - 8, y, words(value)))
        return parts

    def frame(self, height: float, x_name: str, y_name: str) -> list[str]:
        """The axes' lines, and what each measures."""
        corners = [(self.left, self.top), (self.left, self.bottom), (self.right, self.bottom)]
        return [
            path("frame", corners),
            text("level is-unit", self.right, height - 9, x_name),
            text("unit", self.left + 6, self.top + 8, y_name),
        ]


def log_levels(low: float, high: float, most: int) -> list[float]:
    """1, 2 and 5 of each power of ten, or fewer of them where that would be more than `most`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    levels: list[float] = []
    for digits in ((1, 2, 5), (1, 3), (1,)):
        values = (digit * 10.0**power for power in powers for digit in digits)
        levels = [value for value in values if low <= value <= high]
        if len(levels) <= most:
            return levels
    return levels[:: -(-len(levels) // most)]


def round_values(high: float, many: float) -> list[float]:
    """About `many` multiples of 1, 2 or 5 times a power of ten, up to `high`."""
    if high <= 0:
        return []
    rough = high / many
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough)
    return [step * i for i in range(1, int(high / step + 1e-9) + 1)]


def short_tick(words: str) -> str:
    """Round numbers need no decimals: 2.00 GB is 2 GB."""
    number, space, unit = words.partition(" ")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return f"{number}{space}{unit}"


# A roofline's frame: logarithmic axes, the memory's slope, and a flat roof for each dtype.

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
