"""The roofline as SVG: what each operator reached, under what the device could do at most.

Two plots of one kind, both logarithmic: operators that multiply matrices, as FLOP/s against FLOPs
a byte; and operators that only move data, as bytes a second against the bytes of one call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from stepscope.explain.shapes import shape_words
from stepscope.records.figures import byte_rate, duration, flop_rate, size, trimmed
from stepscope.records.words import counted
from stepscope.ui.efficiency import about, of_roof, operators, share_of_roof

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.records.efficiency import Ceilings, Efficiency, Spot

MOST_DOTS = 120
LEAST_TIME = 0.001  # of the time of all operators: shorter ones are not drawn
_WIDTH, _HEIGHT = 640, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 86, 626, 14, 332
_NUMBER_ROOM = 13  # between the middles of two numbers
_SMALLEST, _LARGEST = 3.0, 14.0  # radius of a dot
_SHOWN_PEAKS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
_OFFERED = ("tf32", "fp16", "bf16")
_MOST_LEVELS = 7
_DECADES = 7  # between the ends of an axis at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Both plots; an empty one has nothing to show."""

    products: Markup
    product_dtypes: list[str]  # for the legend
    moving: Markup
    moving_dtypes: list[str]
    left_out: int  # operators that are not drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return _place(_LEFT, _RIGHT, value, self.left, self.right)

    def y(self, value: float) -> float:
        return _place(_BOTTOM, _TOP, value, self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dot:
    spot: Spot
    x: float
    y: float
    number: int  # its place among the widest gaps, from 1; 0 beyond


def draw_roofline(efficiency: Efficiency, numbered: Sequence[Spot]) -> Roofline:
    """`numbered` are the rows of the table beside it: their dots carry the row's number."""
    numbers = {id(spot): place for place, spot in enumerate(numbered, 1)}
    whole = sum(spot.device_ns for spot in efficiency.spots)
    long = [spot for spot in operators(efficiency) if spot.device_ns >= LEAST_TIME * whole]
    by_time = sorted(long, key=lambda spot: -spot.device_ns)
    products = [dot for spot in by_time if (dot := _product(spot, numbers.get(id(spot), 0)))]
    moving = [dot for spot in by_time if (dot := _move(spot, numbers.get(id(spot), 0)))]
    products, moving = products[:MOST_DOTS], moving[:MOST_DOTS]
    longest = by_time[0].device_ns if by_time else 0.0
    return Roofline(
        products=_products(products, efficiency.ceilings, longest),
        product_dtypes=_dtypes(products),
        moving=_moving(moving, efficiency.ceilings, longest),
        moving_dtypes=_dtypes(moving),
        left_out=len(operators(efficiency)) - len(products) - len(moving),
    )


def _product(spot: Spot, number: int) -> _Dot | None:
    if not spot.intensity or not spot.achieved_flops:
        return None
    return _Dot(spot=spot, x=spot.intensity, y=spot.achieved_flops, number=number)


def _move(spot: Spot, number: int) -> _Dot | None:
    if spot.flops or not spot.bytes_moved or not spot.device_ns or not spot.calls:
        return None
    return _Dot(
        spot=spot,
        x=spot.bytes_moved / spot.calls,
        y=spot.bytes_moved / spot.device_ns * 1e9,
        number=number,
    )


def _dtypes(dots: list[_Dot]) -> list[str]:
    return list(dict.fromkeys(dot.spot.dtype for dot in dots))


def _products(dots: list[_Dot], ceilings: Ceilings | None, longest: float) -> Markup:
    if not dots:
        return Markup("")
    peaks = _peaks(ceilings, {dot.spot.dtype for dot in dots})
    moved = ceilings.bytes_s if ceilings else None
    ridges = [peak / moved for peak in peaks.values()] if moved else []
    axes = _Axes(
        **_ends("left", "right", [*(dot.x for dot in dots), *_around(ridges)]),
        **_ends("low", "high", [dot.y for dot in dots] + list(peaks.values())),
    )
    parts = [_grid(axes, _plain, flop_rate, "FLOPs a byte", "FLOP/s reached")]
    used = {dot.spot.dtype for dot in dots}
    parts += _roofs(axes, peaks, moved, used)
    parts += [_mark(dot, axes, longest, _about_product(dot.spot)) for dot in dots]
    parts += _numbers(dots, axes)
    return _svg("Roofline: FLOP/s against FLOPs a byte", parts)


def _around(ridges: list[float]) -> list[float]:
    """So much of the memory's slope and of the flat roofs is always in the picture."""
    return [min(ridges) / 5, max(ridges) * 2] if ridges else []


def _moving(dots: list[_Dot], ceilings: Ceilings | None, longest: float) -> Markup:
    if not dots:
        return Markup("")
    moved = ceilings.bytes_s if ceilings else None
    axes = _Axes(
        **_ends("left", "right", [dot.x for dot in dots]),
        **_ends("low", "high", [dot.y for dot in dots] + ([moved] if moved else [])),
    )
    parts = [_grid(axes, _bytes, byte_rate, "bytes a call", "bytes/s reached")]
    if moved:
        y = axes.y(moved)
        parts.append(_path("roof is-memory", [(_LEFT, y), (_RIGHT, y)]))
        parts.append(_text("roof-name is-memory", _RIGHT, y - 6, f"memory, {byte_rate(moved)}"))
    parts += [_mark(dot, axes, longest, _about_move(dot.spot)) for dot in dots]
    parts += _numbers(dots, axes)
    return _svg("Bandwidth reached against bytes a call", parts)


def _peaks(ceilings: Ceilings | None, used: set[str]) -> dict[str, float]:
    """Peaks to draw: those used, and faster ones that a reader could move to."""
    if ceilings is None:
        return {}
    known = {dtype: ceilings.flops[dtype] for dtype in _SHOWN_PEAKS if dtype in ceilings.flops}
    least = min((peak for dtype, peak in known.items() if dtype in used), default=0.0)
    return {
        dtype: peak
        for dtype, peak in known.items()
        if dtype in used or (dtype in _OFFERED and peak >= least)
    }


def _roofs(axes: _Axes, peaks: dict[str, float], moved: float | None, used: set[str]) -> list[str]:
    """The slope of the memory up to the highest peak; flat lines from there for each dtype."""
    parts = []
    if moved and peaks:
        top = max(peaks.values())
        foot = max(axes.left, axes.low / moved)
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
        start = max(axes.left, peak / moved) if moved else axes.left
        parts.append(_line(f"roof d-{name}{quiet}", axes, (start, peak), (axes.right, peak)))
        label = f"{', '.join(dtypes)}  {flop_rate(peak)}"
        parts.append(_text(f"roof-name d-{name}{quiet}", _RIGHT, axes.y(peak) - 6, label))
    return parts


def _tilt(axes: _Axes, x0: float, x1: float, slope: float) -> float:
    """The angle of the memory's slope on the page, in degrees."""
    across = axes.x(x1) - axes.x(x0)
    return math.degrees(math.atan2(axes.y(x1 * slope) - axes.y(x0 * slope), across))


def _mark(dot: _Dot, axes: _Axes, longest: float, words: str) -> str:
    """A dot as large as its time."""
    share = math.sqrt(dot.spot.device_ns / longest) if longest else 0.0
    radius = _SMALLEST + (_LARGEST - _SMALLEST) * share
    x, y = _spot_at(dot, axes)
    name = f"dot d-{escape(dot.spot.dtype)}" + (" is-again" if dot.spot.recomputed else "")
    mark = f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'
    return f"<g>{mark}<title>{escape(words)}</title></g>"


def _numbers(dots: list[_Dot], axes: _Axes) -> list[str]:
    """Over all dots, the widest gap first; one that would lie on another is left out."""
    taken: list[tuple[float, float]] = []
    parts = []
    for dot in sorted((dot for dot in dots if dot.number), key=lambda dot: dot.number):
        x, y = _spot_at(dot, axes)
        if all(math.dist((x, y), other) >= _NUMBER_ROOM for other in taken):
            taken.append((x, y))
            parts.append(_text("number", x, y, str(dot.number)))
    return parts


def _spot_at(dot: _Dot, axes: _Axes) -> tuple[float, float]:
    """Where a dot is drawn: what is off the axes sits on their edge."""
    return min(max(axes.x(dot.x), _LEFT), _RIGHT), min(max(axes.y(dot.y), _TOP), _BOTTOM)


def _about_product(spot: Spot) -> str:
    lines = _about(spot)
    lines.append(
        f"{flop_rate(spot.achieved_flops or 0.0)} at {spot.intensity or 0.0:,.1f} FLOPs a byte"
    )
    if spot.ceiling_flops:
        near = share_of_roof(spot)
        lines.append(f"of its roof: {near}, {flop_rate(spot.ceiling_flops)}, bound by {spot.bound}")
    return "\n".join(lines)


def _about_move(spot: Spot) -> str:
    lines = _about(spot)
    reached = (spot.bytes_moved or 0.0) / spot.device_ns * 1e9
    lines.append(f"{size((spot.bytes_moved or 0.0) / spot.calls)} a call at {byte_rate(reached)}")
    if of_roof(spot) is not None:
        lines.append(f"of its roof: {share_of_roof(spot)}")
    return "\n".join(lines)


def _about(spot: Spot) -> list[str]:
    return [
        f"{spot.operator} {shape_words(spot.shapes)}",
        f"{about(spot)}: {duration(spot.device_ns)} per step, {counted(round(spot.calls), 'call')}",
    ]


def _grid(
    axes: _Axes,
    across: Callable[[float], str],
    upward: Callable[[float], str],
    x_name: str,
    y_name: str,
) -> str:
    parts = []
    for value in _levels(axes.left, axes.right):
        x = axes.x(value)
        parts.append(_path("grid", [(x, _TOP), (x, _BOTTOM)]))
        parts.append(_text("is-middle", x, _BOTTOM + 18, across(value)))
    for value in _levels(axes.low, axes.high):
        y = axes.y(value)
        parts.append(_path("grid", [(_LEFT, y), (_RIGHT, y)]))
        parts.append(
            _text("level", _LEFT - 8, y, upward(value).replace(".00", "").replace(".0", ""))
        )
    parts.append(_path("frame", [(_LEFT, _TOP), (_LEFT, _BOTTOM), (_RIGHT, _BOTTOM)]))
    parts.append(_text("level", _RIGHT, _HEIGHT - 8, x_name))
    parts.append(_text("unit", _LEFT + 6, _TOP + 8, y_name))
    return "".join(parts)


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _bytes(value: float) -> str:
    return trimmed(size(value))


def _levels(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten, or fewer of them where that would be too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]
        if len(found) <= _MOST_LEVELS:
            break
    return found


def _ends(first: str, last: str, values: Sequence[float]) -> dict[str, float]:
    """Both ends with some room; so far apart that a power of ten is between, yet not too far."""
    high = max(values) * 2.0
    low = max(min(values) / 2.0, high / 10**_DECADES)
    if high < 30 * low:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(30), middle * math.sqrt(30)
    return {first: low, last: high}


def _place(start: float, end: float, value: float, low: float, high: float) -> float:
    return start + (end - start) * math.log(value / low) / math.log(high / low)


def _line(name: str, axes: _Axes, start: tuple[float, float], end: tuple[float, float]) -> str:
    return _path(name, [(axes.x(x), axes.y(y)) for x, y in (start, end)])


def _path(name: str, points: Sequence[tuple[float, float]]) -> str:
    return f'<path class="{name}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'


def _text(name: str, x: float, y: float, text: str) -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(title: str, parts: Sequence[str]) -> Markup:
    """Numbers, fixed words and escaped names only."""
    return Markup(
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">'
        f"{''.join(parts)}</svg>"
    )
