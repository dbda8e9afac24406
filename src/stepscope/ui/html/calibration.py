"""The calibration's page: measured against predicted on log axes, the errors under them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup

from stepscope.records.figures import binary_size, duration
from stepscope.records.words import counted
from stepscope.ui.calibration import (
    calibration_answer,
    collective_rows,
    contention_sentence,
    machine_rows,
)
from stepscope.ui.html.report import _source, _write_atomically, format_percent, sentence

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.records.profile import CollectiveFit, Profile

_COLORS = {
    "world": "compute",
    "pairs": "comm",
    "intra-host": "memory",
    "inter-host": "data_loading",
}
_WIDTH = 440
_LEFT, _RIGHT = 52, 416  # of the plots
_TOP, _BOTTOM = 10, 216  # of times
_OFF_TOP, _OFF_BOTTOM = 242, 296  # of errors
_HEIGHT = 320
_MOST_TICKS = 5
_POINTS = 48  # of a predicted line: straight lines bend on log axes
_LEAST_OFF, _MOST_OFF = 0.1, 1.0  # the error axis ends between these


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One group's line in a chart's caption."""

    color: str
    group: str
    formula: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One kind of collective."""

    title: str
    series: list[Series]
    svg: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """From bytes and nanoseconds to places in the picture."""

    small_bytes: float
    large_bytes: float
    short_ns: float
    long_ns: float
    off: float  # where the error axis ends

    def x(self, size_bytes: float) -> float:
        """Across, by factors."""
        return _between(_LEFT, _RIGHT, size_bytes, self.small_bytes, self.large_bytes)

    def y(self, ns: float) -> float:
        """Up, by factors."""
        return _between(_BOTTOM, _TOP, ns, self.short_ns, self.long_ns)

    def y_off(self, share: float) -> float:
        """Errors: zero in the middle, what is beyond the axis at its end."""
        middle = (_OFF_TOP + _OFF_BOTTOM) / 2
        return middle - max(-1.0, min(1.0, share / self.off)) * (_OFF_BOTTOM - _OFF_TOP) / 2


def write_calibration(profile: Profile, path: Path) -> None:
    """One file that needs nothing else, whole or not at all."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "percent": format_percent,
        "sentence": sentence,
        "size": binary_size,
        "duration": duration,
    }
    style = _source("report.css") + _source("calibration.css")
    page = environment.from_string(_source("calibration.html.j2")).render(
        words=calibration_answer(profile),
        facts=_facts(profile),
        machine=machine_rows(profile),
        charts=draw_charts(profile.fits),
        rows=collective_rows(profile),
        beside=contention_sentence(profile),
        refused=list(profile.not_offered.items()),
        style=Markup(style),
    )
    _write_atomically(path, page)


def draw_charts(fits: Sequence[CollectiveFit]) -> list[Chart]:
    """One for each kind, all groups in it."""
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


def _chart(kind: str, fits: list[CollectiveFit]) -> Chart:
    axes = _axes(fits)
    parts = [_grid(axes)]
    for fit in fits:
        color = _COLORS.get(fit.group, "compute")
        parts.append(f'<g class="s-{color}">{_errors(fit, axes)}{_times(fit, axes)}</g>')
    title = f"{kind}: predicted and measured time by size"
    return Chart(
        title=kind,
        series=[_series(fit) for fit in fits],
        svg=Markup(  # numbers and fixed words only
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">'
            f"{''.join(parts)}</svg>"
        ),
    )


def _series(fit: CollectiveFit) -> Series:
    rates = " → ".join(
        f"{1 / each.beta_ns_per_byte:.2f}" if each.beta_ns_per_byte else "flat"
        for each in fit.segments
    )
    return Series(
        color=_COLORS.get(fit.group, "compute"),
        group=f"{fit.group}, {counted(fit.group_size, 'rank')}",
        formula=f"{duration(fit.latency_ns)} + bytes / {rates} GB/s",
        error=f"off by {format_percent(fit.held_out)}, noise {format_percent(fit.noise)}",
    )


def _axes(fits: list[CollectiveFit]) -> Axes:
    measured = [each for fit in fits for each in fit.measured]
    off = [abs(o) for fit in fits for _, o in _offs(fit)] + [fit.noise * 1.2 for fit in fits]
    return Axes(
        small_bytes=min(each.size_bytes for each in measured) / 1.3,
        large_bytes=max(each.size_bytes for each in measured) * 1.3,
        short_ns=min(each.low_ns for each in measured) / 1.25,
        long_ns=max(each.high_ns for each in measured) * 1.25,
        off=min(_MOST_OFF, max(_LEAST_OFF, math.ceil(max(off) * 20) / 20)),
    )


def _grid(axes: Axes) -> str:
    parts = []
    for size_bytes in _ticks(axes):
        x = axes.x(size_bytes)
        parts.append(_path("grid", (x, _TOP), (x, _BOTTOM)))
        parts.append(_path("grid", (x, _OFF_TOP), (x, _OFF_BOTTOM)))
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - 6}">{binary_size(size_bytes)}</text>'
        )
    for ns in _levels(axes):
        parts.append(_path("grid", (_LEFT, axes.y(ns)), (_RIGHT, axes.y(ns))))
        parts.append(_level(axes.y(ns), _short_duration(ns)))
    for share, text in (
        (axes.off, f"+{axes.off:.0%}"),
        (0.0, "0"),
        (-axes.off, f"−{axes.off:.0%}"),
    ):
        parts.append(_path("grid", (_LEFT, axes.y_off(share)), (_RIGHT, axes.y_off(share))))
        parts.append(_level(axes.y_off(share), text))
    parts.append(f'<text x="{_LEFT + 3}" y="{_OFF_TOP - 5}">error of the prediction</text>')
    frame = (_path("frame", (_LEFT, y), (_RIGHT, y)) for y in (_BOTTOM, _OFF_BOTTOM))
    return "".join([*parts, *frame])


def _ticks(axes: Axes) -> list[int]:
    """Powers of two at equal steps, the last one with them where a step allows it."""
    powers = range(math.ceil(math.log2(axes.small_bytes)), int(math.log2(axes.large_bytes)) + 1)
    last = len(powers) - 1
    steps = range(max(1, math.ceil(last / (_MOST_TICKS - 1))), last + 2)
    step = next((step for step in steps[:4] if last % step == 0), steps[0])
    return [1 << power for power in powers[::step]]


def _levels(axes: Axes) -> list[float]:
    """Powers of ten; 1, 2 and 5 of each where there would be too few."""
    for steps in ((1,), (1, 3), (1, 2, 5)):
        found = [
            float(step * 10**power)
            for power in range(13)
            for step in steps
            if axes.short_ns <= step * 10**power <= axes.long_ns
        ]
        if len(found) >= 3:
            break
    return found


def _short_duration(ns: float) -> str:
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= scale:
            return f"{ns / scale:g} {unit}"
    return f"{ns:g} ns"


def _times(fit: CollectiveFit, axes: Axes) -> str:
    parts = []
    for segment in fit.segments:
        factor = segment.to_bytes / segment.from_bytes
        sizes = [segment.from_bytes * factor ** (i / _POINTS) for i in range(_POINTS + 1)]
        parts.append(_path("line", *((axes.x(each), axes.y(segment.at(each))) for each in sizes)))
    for each in fit.measured:
        x = axes.x(each.size_bytes)
        parts.append(_path("spread", (x, axes.y(each.low_ns)), (x, axes.y(each.high_ns))))
        parts.append(
            f'<circle class="dot" cx="{x:.1f}" cy="{axes.y(each.time_ns):.1f}" r="3.2">'
            f"<title>{binary_size(each.size_bytes)}: measured {duration(each.time_ns)} "
            f"({duration(each.low_ns)} to {duration(each.high_ns)}), "
            f"predicted {duration(fit.expected_ns(each.size_bytes))}</title></circle>"
        )
    return "".join(parts)


def _errors(fit: CollectiveFit, axes: Axes) -> str:
    top, bottom = axes.y_off(fit.noise), axes.y_off(-fit.noise)
    parts = [
        f'<rect class="band" x="{_LEFT}" y="{top:.1f}" width="{_RIGHT - _LEFT}" '
        f'height="{bottom - top:.1f}"/>'
    ]
    for size_bytes, off in _offs(fit):
        x, y = axes.x(size_bytes), axes.y_off(off)
        parts.append(_path("spread", (x, axes.y_off(0)), (x, y)))
        parts.append(
            f'<circle class="off" cx="{x:.1f}" cy="{y:.1f}" r="2.2">'
            f"<title>{binary_size(size_bytes)}: predicted {off:+.1%} of measured</title></circle>"
        )
    return "".join(parts)


def _offs(fit: CollectiveFit) -> list[tuple[int, float]]:
    return [
        (each.size_bytes, fit.expected_ns(each.size_bytes) / each.time_ns - 1)
        for each in fit.measured
    ]


def _between(start: float, end: float, value: float, low: float, high: float) -> float:
    return start + (end - start) * math.log(value / low) / math.log(high / low)


def _path(kind: str, *points: tuple[float, float]) -> str:
    places = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class="{kind}" d="M{places}"/>'


def _level(y: float, text: str) -> str:
    return f'<text class="level" x="{_LEFT - 7}" y="{y:.1f}">{text}</text>'
