"""The calibration's page: measured and predicted times on log axes, the errors below."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.records.figures import binary_size, duration, percent, signed_percent, significant
from stepscope.records.words import counted
from stepscope.ui.calibration import (
    calibration_answer,
    collective_rows,
    contention_sentence,
    machine_rows,
)
from stepscope.ui.html.render import render_page, write_atomically
from stepscope.ui.html.svg import LogAxes, circle, drawing, path, rect, short_tick, text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from markupsafe import Markup

    from stepscope.records.profile import CollectiveFit, Profile

_COLORS = {
    "world": "compute",
    "pairs": "comm",
    "intra-host": "memory",
    "inter-host": "data_loading",
}
_WIDTH = 440
_LEFT, _RIGHT = 52, 416
_TOP, _BOTTOM = 10, 216  # of the times
_ERRORS_TOP, _ERRORS_BOTTOM = 242, 296
_HEIGHT = 320
_MOST_TICKS = 5
_POINTS = 48  # of a predicted line: straight lines bend on log axes
_LEAST_ERROR, _MOST_ERROR = 0.1, 1.0  # the error axis ends between these


@dataclass(frozen=True, slots=True, kw_only=True)
class FitLine:
    """One group's line in a chart's caption."""

    color: str
    group: str
    formula: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FitChart:
    """One kind of collective."""

    title: str
    series: list[FitLine]
    svg: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class FitAxes(LogAxes):
    """Bytes across, nanoseconds up; errors on a linear axis below."""

    largest_error: float  # at the end of the error axis

    def y_error(self, share: float) -> float:
        """Zero in the middle; what is beyond the axis at its end."""
        middle = (_ERRORS_TOP + _ERRORS_BOTTOM) / 2
        clipped = max(-1.0, min(1.0, share / self.largest_error))
        return middle - clipped * (_ERRORS_BOTTOM - _ERRORS_TOP) / 2


def write_calibration(profile: Profile, file: Path) -> None:
    words, charts = calibration_answer(profile), draw_charts(profile.fits)
    links = [("verdict", "Verdict"), ("machine", "Machine"), ("collectives", "Collectives")]
    page = render_page(
        "calibration.html.j2",
        styles=["report.css", "calibration.css"],
        title=words.verdict,
        links=links if charts else links[:2],
        message_size=binary_size,
        words=words,
        facts=_facts(profile),
        machine=machine_rows(profile),
        charts=charts,
        rows=collective_rows(profile),
        beside=contention_sentence(profile),
        refused=list(profile.not_offered.items()),
    )
    write_atomically(file, page)


def draw_charts(fits: Sequence[CollectiveFit]) -> list[FitChart]:
    """One for each kind of collective, with all groups in it."""
    return [
        _chart(kind, [fit for fit in fits if fit.kind == kind])
        for kind in dict.fromkeys(fit.kind for fit in fits)
    ]


def _facts(profile: Profile) -> list[tuple[str, str]]:
    facts = [("Host", profile.host), ("Device", profile.device), ("torch", profile.torch)]
    if profile.backend:
        facts += [("Ranks", str(profile.world_size)), ("Backend", profile.backend)]
    facts.append(("Measured", time.strftime("%Y-%m-%d %H:%M", time.localtime(profile.when_unix))))
    return facts


def _chart(kind: str, fits: list[CollectiveFit]) -> FitChart:
    axes = _axes(fits)
    parts = _grid(axes)
    for fit in fits:
        color = _COLORS.get(fit.group, "compute")
        parts.append(f'<g class="s-{color}">{_draw_errors(fit, axes)}{_draw_times(fit, axes)}</g>')
    title = f"{kind}: predicted and measured time by size"
    return FitChart(
        title=kind,
        series=[_fit_line(fit) for fit in fits],
        svg=drawing(_WIDTH, _HEIGHT, title, parts),
    )


def _fit_line(fit: CollectiveFit) -> FitLine:
    rates = " → ".join(
        significant(1 / segment.beta_ns_per_byte) if segment.beta_ns_per_byte else "flat"
        for segment in fit.segments
    )
    return FitLine(
        color=_COLORS.get(fit.group, "compute"),
        group=f"{fit.group}, {counted(fit.group_size, 'rank')}",
        formula=f"{duration(fit.latency_ns)} + bytes / {rates} GB/s",
        error=f"off by {percent(fit.held_out)}, noise {percent(fit.noise)}",
    )


def _axes(fits: list[CollectiveFit]) -> FitAxes:
    measured = [point for fit in fits for point in fit.measured]
    errors = [abs(error) for fit in fits for _, error in _errors(fit)]
    largest = max(errors + [fit.noise * 1.2 for fit in fits])
    return FitAxes(
        left=_LEFT,
        right=_RIGHT,
        top=_TOP,
        bottom=_BOTTOM,
        x_low=min(point.size_bytes for point in measured) / 1.3,
        x_high=max(point.size_bytes for point in measured) * 1.3,
        y_low=min(point.low_ns for point in measured) / 1.25,
        y_high=max(point.high_ns for point in measured) * 1.25,
        largest_error=min(_MOST_ERROR, max(_LEAST_ERROR, math.ceil(largest * 20) / 20)),
    )


def _grid(axes: FitAxes) -> list[str]:
    parts = []
    for size_bytes in _ticks(axes):
        x = axes.x(size_bytes)
        parts.append(path("grid", [(x, _TOP), (x, _BOTTOM)]))
        parts.append(path("grid", [(x, _ERRORS_TOP), (x, _ERRORS_BOTTOM)]))
        parts.append(text("tick", x, _HEIGHT - 6, binary_size(size_bytes)))
    for ns in _levels(axes):
        parts.append(path("grid", [(_LEFT, axes.y(ns)), (_RIGHT, axes.y(ns))]))
        parts.append(_level(axes.y(ns), short_tick(duration(ns))))
    for error in (axes.largest_error, 0.0, -axes.largest_error):
        y = axes.y_error(error)
        parts.append(path("grid", [(_LEFT, y), (_RIGHT, y)]))
        parts.append(_level(y, signed_percent(error).replace("-", "−") if error else "0"))
    parts.append(text("", _LEFT + 3, _ERRORS_TOP - 5, "error of the prediction"))
    parts += [path("frame", [(_LEFT, y), (_RIGHT, y)]) for y in (_BOTTOM, _ERRORS_BOTTOM)]
    return parts


def _ticks(axes: FitAxes) -> list[int]:
    """Powers of two at equal steps, the last one among them where a step allows it."""
    powers = range(math.ceil(math.log2(axes.x_low)), int(math.log2(axes.x_high)) + 1)
    last = len(powers) - 1
    steps = range(max(1, math.ceil(last / (_MOST_TICKS - 1))), last + 2)
    step = next((step for step in steps[:4] if last % step == 0), steps[0])
    return [1 << power for power in powers[::step]]


def _levels(axes: FitAxes) -> list[float]:
    """Powers of ten; 1, 2 and 5 of each where there would be too few."""
    levels: list[float] = []
    for digits in ((1,), (1, 3), (1, 2, 5)):
        values = (float(digit * 10**power) for power in range(13) for digit in digits)
        levels = [value for value in values if axes.y_low <= value <= axes.y_high]
        if len(levels) >= 3:
            break
    return levels


def _draw_times(fit: CollectiveFit, axes: FitAxes) -> str:
    parts = []
    for segment in fit.segments:
        factor = segment.to_bytes / segment.from_bytes
        sizes = [segment.from_bytes * factor ** (i / _POINTS) for i in range(_POINTS + 1)]
        parts.append(path("line", [(axes.x(size), axes.y(segment.at(size))) for size in sizes]))
    for point in fit.measured:
        x = axes.x(point.size_bytes)
        title = (
            f"{binary_size(point.size_bytes)}: measured {duration(point.time_ns)} "
            f"({duration(point.low_ns)} to {duration(point.high_ns)}), "
            f"predicted {duration(fit.expected_ns(point.size_bytes))}"
        )
        parts.append(path("spread", [(x, axes.y(point.low_ns)), (x, axes.y(point.high_ns))]))
        parts.append(circle("dot", x, axes.y(point.time_ns), 3.2, title=title))
    return "".join(parts)


def _draw_errors(fit: CollectiveFit, axes: FitAxes) -> str:
    top, bottom = axes.y_error(fit.noise), axes.y_error(-fit.noise)
    parts = [rect("band", _LEFT, top, _RIGHT - _LEFT, bottom - top)]
    for size_bytes, error in _errors(fit):
        x, y = axes.x(size_bytes), axes.y_error(error)
        title = f"{binary_size(size_bytes)}: the prediction is off by {signed_percent(error)}"
        parts.append(path("spread", [(x, axes.y_error(0)), (x, y)]))
        parts.append(circle("off", x, y, 2.2, title=title))
    return "".join(parts)


def _errors(fit: CollectiveFit) -> list[tuple[int, float]]:
    """Each measured size, and how far the prediction is off."""
    return [
        (point.size_bytes, fit.expected_ns(point.size_bytes) / point.time_ns - 1)
        for point in fit.measured
    ]


def _level(y: float, words: str) -> str:
    return text("level", _LEFT - 7, y, words)
