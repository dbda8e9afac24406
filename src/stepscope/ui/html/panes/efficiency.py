"""Efficiency: MFU, the way down from the peak, roofline and widest gaps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from stepscope.explain.efficiency import above_peak
from stepscope.records.explanation import RankExplanation
from stepscope.records.hardware import Ceilings, Efficiency, Spot, which_call
from stepscope.text.figures import byte_rate, duration, flop_rate, flops, percent, significant, size
from stepscope.text.words import counted
from stepscope.ui.html.pane import Pane, ReportData, rank_label
from stepscope.ui.html.svg import (
    UNDER_AXES,
    LogAxes,
    around_ridges,
    circle,
    draw_roofs,
    drawing,
    path,
    plain_level,
    roof_axes,
    roof_grid,
    short_tick,
    shown_peaks,
    text,
)
from stepscope.ui.topics.device_use import (
    about_spot,
    against_fastest,
    gaps,
    no_peak,
    of_roof,
    operators,
    peak_losses,
    share_of_peak,
    share_of_roof,
)

# The roofline as SVG: what each operator reaches, under the peaks of the device.
#
# Two logarithmic plots: operators that multiply matrices, as FLOP/s against FLOPs per byte; and
# operators that only move data, as bytes per second against the bytes of one call.

MOST_DOTS = 120
LEAST_TIME = 0.001  # share of the time of all operators: shorter ones are not drawn
_WIDTH, _HEIGHT = 640, 380
_LEFT, _RIGHT = 86, 626
_BOX = (_LEFT, _RIGHT, 14, _HEIGHT - UNDER_AXES)
_NUMBER_ROOM = 13  # between the centres of two numbers
_SMALLEST, _LARGEST = 3.0, 14.0  # radius of a dot


class _Dot(NamedTuple):
    spot: Spot
    x: float
    y: float
    number: int  # its row in the table of gaps, from 1; 0 where it has none


def draw_roofline(efficiency: Efficiency, numbered: Sequence[Spot]) -> dict[str, Any]:
    """Both plots; an empty one has nothing to show.

    `numbered` are the rows of the table next to it: their dots carry the row's number.
    """
    numbers = {id(spot): place for place, spot in enumerate(numbered, 1)}
    whole = sum(spot.device_ns for spot in efficiency.spots)
    long = [spot for spot in operators(efficiency) if spot.device_ns >= LEAST_TIME * whole]
    by_time = sorted(long, key=lambda spot: -spot.device_ns)
    products, moving = [], []
    for spot in by_time:
        number = numbers.get(id(spot), 0)
        if spot.intensity and spot.achieved_flops:
            products.append(_Dot(spot, spot.intensity, spot.achieved_flops, number))
        if not spot.flops and spot.bytes_moved and spot.device_ns and spot.calls:
            rate = spot.bytes_moved / spot.device_ns * 1e9
            moving.append(_Dot(spot, spot.bytes_moved / spot.calls, rate, number))
    products, moving = products[:MOST_DOTS], moving[:MOST_DOTS]
    longest = by_time[0].device_ns if by_time else 0.0
    return {
        "products": _products(products, efficiency.ceilings, longest),
        "product_dtypes": list(dict.fromkeys(dot.spot.dtype for dot in products)),
        "moving": _moving(moving, efficiency.ceilings, longest),
        "moving_dtypes": list(dict.fromkeys(dot.spot.dtype for dot in moving)),
        "left_out": len(operators(efficiency)) - len(products) - len(moving),
    }


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
    parts += _marks(dots, axes, longest, _about_product)
    return drawing(_WIDTH, _HEIGHT, "Roofline: FLOP/s against FLOPs per byte", parts)


def _moving(dots: list[_Dot], ceilings: Ceilings | None, longest: float) -> Markup:
    if not dots:
        return Markup("")
    moved = ceilings.bytes_s if ceilings else None
    axes = roof_axes(
        _BOX, [dot.x for dot in dots], [*(dot.y for dot in dots), *([moved] if moved else [])]
    )
    parts = roof_grid(
        axes, lambda value: short_tick(size(value)), byte_rate, "bytes per call", "bytes/s reached"
    )
    if moved:
        y = axes.y(moved)
        parts.append(path("roof is-memory", [(_LEFT, y), (_RIGHT, y)]))
        parts.append(text("roof-name is-memory", _RIGHT, y - 6, f"memory, {byte_rate(moved)}"))
    parts += _marks(dots, axes, longest, _about_move)
    return drawing(_WIDTH, _HEIGHT, "Bandwidth reached against bytes per call", parts)


def _marks(
    dots: list[_Dot], axes: LogAxes, longest: float, about: Callable[[Spot], list[str]]
) -> list[str]:
    """Dots as large as their times; over all of them their numbers, the widest gap first.

    A number that would cover another is left out.
    """
    parts = []
    for dot in dots:
        share = math.sqrt(dot.spot.device_ns / longest) if longest else 0.0
        radius = round(_SMALLEST + (_LARGEST - _SMALLEST) * share, 1)
        kind = f"dot d-{escape(dot.spot.dtype)}" + (" is-again" if dot.spot.recomputed else "")
        mark = circle(kind, *axes.inside(dot.x, dot.y), radius)
        calls = counted(round(dot.spot.calls), "call")
        lines = [
            f"{dot.spot.operator} {which_call(dot.spot)}",
            f"{about_spot(dot.spot)}: {duration(dot.spot.device_ns)} per step, {calls}",
            *about(dot.spot),
        ]
        words = "\n".join(lines)
        parts.append(f"<g>{mark}<title>{escape(words)}</title></g>")
    taken: list[tuple[float, float]] = []
    for dot in sorted((dot for dot in dots if dot.number), key=lambda dot: dot.number):
        x, y = axes.inside(dot.x, dot.y)
        if all(math.dist((x, y), other) >= _NUMBER_ROOM for other in taken):
            taken.append((x, y))
            parts.append(text("number", x, y, str(dot.number)))
    return parts


def _about_product(spot: Spot) -> list[str]:
    lines = [
        f"{flop_rate(spot.achieved_flops or 0.0)} at "
        f"{significant(spot.intensity or 0.0)} FLOPs per byte"
    ]
    if spot.ceiling_flops:
        near = share_of_roof(spot)
        lines.append(f"of its roof: {near}, {flop_rate(spot.ceiling_flops)}, bound by {spot.bound}")
    return lines


def _about_move(spot: Spot) -> list[str]:
    moved = spot.bytes_moved or 0.0
    rate = byte_rate(moved / spot.device_ns * 1e9)
    known = [f"of its roof: {share_of_roof(spot)}"] if of_roof(spot) is not None else []
    return [f"{size(moved / spot.calls)} per call at {rate}", *known]


MOST_GAPS = 15
MOST_RANKS = 8  # with pictures of their own: ranks of one job mostly do the same work
_SOURCES = {"table": "by its data sheet", "calibrated": "as calibrated here"}


def efficiency_view(rank: RankExplanation, *, drawn: bool) -> dict[str, Any] | None:
    """None where nothing is known; without pictures unless `drawn`."""
    efficiency = rank.efficiency
    if efficiency is None:
        return None
    widest = gaps(efficiency, MOST_GAPS)
    roofline = draw_roofline(efficiency, widest) if drawn else None
    ceilings = efficiency.ceilings
    return {
        "mfu": "" if efficiency.mfu is None or above_peak(efficiency) else percent(efficiency.mfu),
        "mfu_share": efficiency.mfu or 0.0,
        "sentence": _sentence(efficiency),
        "facts": _facts(efficiency),
        "falls": peak_losses(rank),
        "roofs": ceilings is not None,
        "step_ms": rank.budget.step_ms,
        "roofline": roofline,
        "no_roofline": _no_roofline(efficiency, roofline),
        "rows": _rows(widest) if drawn else [],
        "notes": efficiency.notes,
        "source": ceilings.source if ceilings else "",
    }


def _sentence(efficiency: Efficiency) -> str:
    if efficiency.mfu is None or not efficiency.step_ms or efficiency.peak_flops is None:
        return f"MFU is not known: {no_peak(efficiency)}".replace("`", "")
    if wrong := above_peak(efficiency):
        return f"MFU is not known: {wrong}"
    reached = efficiency.model_flops / (efficiency.step_ms / 1e3)
    how = _SOURCES.get(efficiency.peak_source or "", "")
    device = efficiency.ceilings.device if efficiency.ceilings else "the device"
    return (
        f"of {device}'s peak is used by the model's own arithmetic: {flop_rate(reached)} of "
        f"{flop_rate(efficiency.peak_flops)} in {efficiency.dtype}, {how}. "
        f"{against_fastest(efficiency)}"
    ).strip()


def _facts(efficiency: Efficiency) -> list[tuple[str, str, str]]:
    facts = []
    if efficiency.model_flops:
        per_step = flops(efficiency.model_flops)
        facts.append(("FLOPs per step", per_step, "Forward and backward, of the model"))
    if efficiency.recomputed_flops:
        again = flops(efficiency.recomputed_flops)
        facts.append(("Recomputed", again, "Done a second time: counts for HFU, not for MFU"))
    if efficiency.hfu is not None and efficiency.recomputed_flops and not above_peak(efficiency):
        facts.append(("HFU", percent(efficiency.hfu), "Of the peak, recomputation included"))
    for use in efficiency.by_dtype:
        if use.device_ns:
            reached = use.flops / (use.device_ns / 1e9)
            peak = ""
            if use.peak_flops:
                peak = f", {share_of_peak(reached / use.peak_flops)} of its peak"
            facts.append(
                (f"Matmuls in {use.dtype}", flop_rate(reached), f"{duration(use.device_ns)}{peak}")
            )
    if efficiency.tensor_core_share is not None:
        share = percent(efficiency.tensor_core_share)
        facts.append(
            ("On tensor cores", share, "Of the time in matmuls, convolutions and attention")
        )
    if efficiency.ceilings and efficiency.ceilings.bytes_s:
        peak = byte_rate(efficiency.ceilings.bytes_s)
        facts.append(("Memory", peak, "Peak bandwidth, read and write"))
    if efficiency.unknown_share >= 0.005:
        share = percent(efficiency.unknown_share)
        facts.append(("Not known", share, "Of device time: kernels whose FLOPs are unknown"))
    return facts


def _no_roofline(efficiency: Efficiency, roofline: dict[str, Any] | None) -> str:
    if roofline is None:
        return "Not drawn for this rank: ranks of one job mostly do the same work."
    if not (roofline["products"] or roofline["moving"]):
        return "Nothing to draw: the trace gives no operator's FLOPs or bytes."
    if efficiency.ceilings is None or not efficiency.ceilings.flops:
        return (
            "The roofs are missing: this device's peaks are not known. "
            "Run stepscope calibrate on it."
        )
    return ""


def _rows(spots: list[Spot]) -> list[dict[str, Any]]:
    """The table next to the roofline; bars are shares of the widest gap."""
    widest = max((spot.gap_ns or 0.0 for spot in spots), default=0.0)
    return [
        {
            "number": place,
            "operator": spot.operator,
            "shapes": which_call(spot),
            "about": about_spot(spot),
            "time": duration(spot.device_ns),
            "near": share_of_roof(spot),
            "gap": duration(spot.gap_ns or 0.0),
            "bar": (spot.gap_ns or 0.0) / widest if widest else 0.0,
            "bound": spot.bound,
        }
        for place, spot in enumerate(spots, 1)
    ]


def efficiency_views(report: ReportData) -> list[tuple[str, dict[str, Any] | None]] | None:
    views = [
        (rank_label(rank), efficiency_view(rank, drawn=place < MOST_RANKS))
        for place, rank in enumerate(report.ranks)
    ]
    return views if any(view for _, view in views) else None


PANE = Pane(id="efficiency", title="Efficiency", order=50, view=efficiency_views)
