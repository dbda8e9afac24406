"""A predicted number against something that can be turned up, with its band, as SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from stepscope.ui.whatif import figures

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH, _HEIGHT = 620, 256
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 548, 16, 188
_EDGE = 26
_LEVELS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A place on the curve."""

    label: str
    value: float
    low: float
    high: float
    under: str = ""  # a second line below it


def draw_band(
    points: Sequence[Point], *, title: str, across: str, unit: str, now: float | None = None
) -> Markup:
    """One dot a point, at equal distances; a dashed line where things are now."""
    top = 1.05 * max(max(point.high for point in points), now or 0.0)
    places = [(_x(i, len(points)), point) for i, point in enumerate(points)]
    upper = [(x, _y(point.high, top)) for x, point in places]
    lower = [(x, _y(point.low, top)) for x, point in places]
    parts = [_levels(top, unit)]
    parts.append(f'<path class="band" d="{_line([*upper, *reversed(lower)])}Z"/>')
    if now is not None:
        y = _y(now, top)
        parts.append(f'<path class="now" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>')
        parts.append(_text("word", _RIGHT + 8, y - 7, "now"))
        parts.append(_text("word", _RIGHT + 8, y + 8, f"{figures(now)} {unit}"))
    parts.append(f'<path class="curve" d="{_line([(x, _y(p.value, top)) for x, p in places])}"/>')
    for x, point in places:
        words = (
            f"{across} {point.label}: {figures(point.value)} {unit} "
            f"({figures(point.low)} to {figures(point.high)})"
        )
        parts.append(
            f'<circle class="dot" cx="{x:.1f}" cy="{_y(point.value, top):.1f}" r="4.5">'
            f"<title>{escape(words)}</title></circle>"
        )
        parts.append(_text("level", x, _BOTTOM + 20, point.label))
        parts.append(_text("level", x, _BOTTOM + 38, point.under) if point.under else "")
    below = 60 if any(point.under for point in points) else 44
    parts.append(_text("level", (_LEFT + _RIGHT) / 2, _BOTTOM + below, across))
    return Markup(
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def _levels(top: float, unit: str) -> str:
    parts = []
    for value in _round_values(top):
        y = _y(value, top)
        words = f"{value:,.6g}" if value else f"0 {unit}"
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>')
        parts.append(_text("level is-side", _LEFT - 8, y, words))
    return "".join(parts)


def _round_values(most: float) -> list[float]:
    """0 and 1, 2 or 5 times a power of ten, up to `most`."""
    rough = most / _LEVELS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough)
    return [step * i for i in range(int(most / step + 1e-9) + 1)]


def _x(place: int, many: int) -> float:
    if many < 2:
        return (_LEFT + _RIGHT) / 2
    return _LEFT + _EDGE + (_RIGHT - _LEFT - 2 * _EDGE) * place / (many - 1)


def _y(value: float, top: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * value / top


def _line(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _text(name: str, x: float, y: float, text: str) -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
