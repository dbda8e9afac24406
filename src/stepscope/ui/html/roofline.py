"""The roofline as SVG: what each operator reaches, under the peaks of the device.

Two logarithmic plots: operators that multiply matrices, as FLOP/s against FLOPs per byte; and
operators that only move data, as bytes per second against the bytes of one call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from stepscope.explain.shapes import which_call
from stepscope.records.figures import byte_rate, duration, flop_rate, significant, size
from stepscope.records.words import counted
from stepscope.ui.efficiency import about, of_roof, operators, share_of_roof
from stepscope.ui.html.roof_lines import (
    UNDER_AXES,
    around_ridges,
    draw_roofs,
    plain_level,
    roof_axes,
    roof_grid,
    shown_peaks,
)
from stepscope.ui.html.svg import circle, drawing, path, short_tick, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.efficiency import Ceilings, Efficiency, Spot
    from stepscope.ui.html.svg import LogAxes

MOST_DOTS = 120
LEAST_TIME = 0.001  # share of the time of all operators: shorter ones are not drawn
_WIDTH, _HEIGHT = 640, 380
_LEFT, _RIGHT = 86, 626
_BOX = (_LEFT, _RIGHT, 14, _HEIGHT - UNDER_AXES)
_NUMBER_ROOM = 13  # between the centres of two numbers
_SMALLEST, _LARGEST = 3.0, 14.0  # radius of a dot


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Both plots; an empty one has nothing to show."""

    products: Markup
    product_dtypes: list[str]  # for the legend
    moving: Markup
    moving_dtypes: list[str]
    left_out: int  # operators that are not drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dot:
    spot: Spot
    x: float
    y: float
    number: int  # its row in the table of gaps, from 1; 0 where it has none


def draw_roofline(efficiency: Efficiency, numbered: Sequence[Spot]) -> Roofline:
    """`numbered` are the rows of the table next to it: their dots carry the row's number."""
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
    used = {dot.spot.dtype for dot in dots}
    peaks = shown_peaks(ceilings.flops if ceilings else {}, used)
    moved = ceilings.bytes_s if ceilings else None
    axes = roof_axes(
        _BOX,
        [*(dot.x for dot in dots), *around_ridges(peaks, moved)],
        [*(dot.y for dot in dots), *peaks.values()],
    )
    parts = roof_grid(axes, plain_level, flop_rate, "FLOPs per byte", "FLOP/s reached")
    parts += draw_roofs(axes, peaks, moved, used)
    parts += [_mark(dot, axes, longest, _about_product(dot.spot)) for dot in dots]
    parts += _numbers(dots, axes)
    return drawing(_WIDTH, _HEIGHT, "Roofline: FLOP/s against FLOPs per byte", parts)


def _moving(dots: list[_Dot], ceilings: Ceilings | None, longest: float) -> Markup:
    if not dots:
        return Markup("")
    moved = ceilings.bytes_s if ceilings else None
    axes = roof_axes(
        _BOX, [dot.x for dot in dots], [*(dot.y for dot in dots), *([moved] if moved else [])]
    )
    parts = roof_grid(axes, _bytes, byte_rate, "bytes per call", "bytes/s reached")
    if moved:
        y = axes.y(moved)
        parts.append(path("roof is-memory", [(_LEFT, y), (_RIGHT, y)]))
        parts.append(text("roof-name is-memory", _RIGHT, y - 6, f"memory, {byte_rate(moved)}"))
    parts += [_mark(dot, axes, longest, _about_move(dot.spot)) for dot in dots]
    parts += _numbers(dots, axes)
    return drawing(_WIDTH, _HEIGHT, "Bandwidth reached against bytes per call", parts)


def _mark(dot: _Dot, axes: LogAxes, longest: float, words: str) -> str:
    """A dot as large as its time."""
    share = math.sqrt(dot.spot.device_ns / longest) if longest else 0.0
    radius = _SMALLEST + (_LARGEST - _SMALLEST) * share
    kind = f"dot d-{escape(dot.spot.dtype)}" + (" is-again" if dot.spot.recomputed else "")
    mark = circle(kind, *axes.inside(dot.x, dot.y), round(radius, 1))
    return f"<g>{mark}<title>{escape(words)}</title></g>"


def _numbers(dots: list[_Dot], axes: LogAxes) -> list[str]:
    """Drawn over all dots, the widest gap first; one that would cover another is left out."""
    taken: list[tuple[float, float]] = []
    parts = []
    for dot in sorted((dot for dot in dots if dot.number), key=lambda dot: dot.number):
        x, y = axes.inside(dot.x, dot.y)
        if all(math.dist((x, y), other) >= _NUMBER_ROOM for other in taken):
            taken.append((x, y))
            parts.append(text("number", x, y, str(dot.number)))
    return parts


def _about_product(spot: Spot) -> str:
    lines = _about(spot)
    lines.append(
        f"{flop_rate(spot.achieved_flops or 0.0)} at "
        f"{significant(spot.intensity or 0.0)} FLOPs per byte"
    )
    if spot.ceiling_flops:
        near = share_of_roof(spot)
        lines.append(f"of its roof: {near}, {flop_rate(spot.ceiling_flops)}, bound by {spot.bound}")
    return "\n".join(lines)


def _about_move(spot: Spot) -> str:
    lines = _about(spot)
    reached = (spot.bytes_moved or 0.0) / spot.device_ns * 1e9
    lines.append(f"{size((spot.bytes_moved or 0.0) / spot.calls)} per call at {byte_rate(reached)}")
    if of_roof(spot) is not None:
        lines.append(f"of its roof: {share_of_roof(spot)}")
    return "\n".join(lines)


def _about(spot: Spot) -> list[str]:
    return [
        f"{spot.operator} {which_call(spot)}",
        f"{about(spot)}: {duration(spot.device_ns)} per step, {counted(round(spot.calls), 'call')}",
    ]


def _bytes(value: float) -> str:
    return short_tick(size(value))
