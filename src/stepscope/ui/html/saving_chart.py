"""What save_memory did, as SVG: bytes kept for backward through a step, without the plan as areas
by what is done with them, with the plan as a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from stepscope.records.figures import size
from stepscope.records.saved_memory import ACTIONS
from stepscope.ui.html.svg import drawing, path, round_values, short_tick, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.saved_memory import SavingTimeline
    from stepscope.ui.html.svg import Point

_WIDTH, _HEIGHT = 1160, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 1146, 30, 266
_FORWARD = 1 / 3  # of the width: backward takes about twice as long


def drawn_actions(line: SavingTimeline) -> list[str]:
    """From the bottom up: what stays first."""
    known = [action for action in ACTIONS if any(line.before_bytes.get(action, ()))]
    return known + sorted(
        action
        for action in line.before_bytes
        if action not in ACTIONS and any(line.before_bytes[action])
    )


def draw_saving(line: SavingTimeline | None) -> Markup:
    if line is None or not line.is_whole():
        return Markup("")
    points = len(line.after_bytes)
    places = [_x(line, point) for point in range(points)]
    floor = [0] * points
    areas = []
    for action in drawn_actions(line):
        roof = [a + b for a, b in zip(floor, line.before_bytes[action], strict=True)]
        areas.append((action, floor, roof))
        floor = roof
    top = float(max(1, *floor, *line.after_bytes))
    parts = [*_levels(top), *_phases()]
    for action, low, high in areas:
        upper, lower = (_points(places, levels, top) for levels in (high, low))
        kind = action if action in ACTIONS else "keep"
        parts.append(
            path(f"sv-{kind}", [*upper, *reversed(lower)], closed=True, title=f"{action}, before")
        )
    parts.append(path("sv-after", _points(places, line.after_bytes, top), title="with the change"))
    parts += _peak(places, floor, top, "without")
    parts += _peak(places, line.after_bytes, top, "with")
    return drawing(_WIDTH, _HEIGHT, "Bytes saved for backward, with and without the change", parts)


def _x(line: SavingTimeline, point: int) -> float:
    """Forward fills the left third, backward the rest."""
    forward = min(line.forward_points, len(line.after_bytes))
    if point < forward:
        share = _FORWARD * (point + 1) / forward
    else:
        share = _FORWARD + (1 - _FORWARD) * (point - forward + 1) / (
            len(line.after_bytes) - forward
        )
    return _LEFT + (_RIGHT - _LEFT) * share


def _points(places: Sequence[float], levels: Sequence[int], top: float) -> list[Point]:
    start = (float(_LEFT), _y(0 if len(levels) > 1 else levels[0], top))
    return [start, *((x, _y(level, top)) for x, level in zip(places, levels, strict=True))]


def _peak(places: Sequence[float], levels: Sequence[int], top: float, which: str) -> list[str]:
    highest = max(range(len(levels)), key=lambda point: levels[point])
    x, y = places[highest], _y(levels[highest], top)
    words = f"{size(levels[highest])} {which}"
    return [text("value is-strong", x + 8, max(_TOP - 4, y - 6), words)]


def _phases() -> list[str]:
    middle = _LEFT + (_RIGHT - _LEFT) * _FORWARD
    return [
        path("phase", [(middle, _TOP - 6), (middle, _BOTTOM)]),
        text("unit", _LEFT + 4, _BOTTOM + 18, "forward"),
        text("unit", middle + 4, _BOTTOM + 18, "backward"),
    ]


def _levels(top: float) -> list[str]:
    parts = []
    for value in [0.0, *round_values(top, 5)]:
        parts.append(path("grid", [(_LEFT, _y(value, top)), (_RIGHT, _y(value, top))]))
        parts.append(text("level", _LEFT - 8, _y(value, top), short_tick(size(value))))
    return parts


def _y(value: float, top: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * value / top
