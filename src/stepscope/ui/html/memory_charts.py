"""Memory as SVG: through a step, at its moments, and against the batch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from markupsafe import Markup

from stepscope.explain.memory.batch import peak_at
from stepscope.explain.memory.words import LABELS
from stepscope.records.figures import duration, factor, size
from stepscope.records.memory import CATEGORIES
from stepscope.records.words import counted
from stepscope.ui.html.svg import circle, drawing, path, rect, round_values, short_tick, text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.records.memory import LargestBatch, Memory, MemoryTimeline, Moment
    from stepscope.ui.html.svg import Point

_WIDTH, _HEIGHT = 1160, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 1146, 26, 262
_HALF = 560  # width of the batch chart
_POINTS = 60
_MOST_LEVELS = 5


def draw_timeline(memory: Memory) -> Markup:
    """Stacked areas through the step; one area where categories cannot be separated."""
    line = memory.timeline
    if line is None or len(line.time_ns) < 2:
        return Markup("")
    top = max(*line.allocated_bytes, *(line.reserved_bytes or (0,)))
    last = max(line.time_ns[-1], 1)
    shown = line.categories
    floor: tuple[int, ...] = (0,) * len(line.time_ns)
    parts = [*_levels(top, _RIGHT), *_phase_bands(line, last)]
    if not shown:
        parts.append(_area("plain", line.time_ns, floor, line.allocated_bytes, last, top))
    for name in [name for name in CATEGORIES if name in shown]:
        roof = tuple(a + b for a, b in zip(floor, shown[name], strict=True))
        parts.append(_area(name, line.time_ns, floor, roof, last, top))
        floor = roof
    if line.reserved_bytes is not None:
        parts.append(path("reserved", _steps(line.time_ns, line.reserved_bytes, last, top)))
    parts += [_peak_mark(line, last, top), *_times(last)]
    parts.append(f'<path class="cursor" d="M0 {_TOP}V{_BOTTOM}" hidden=""/>')
    data = {
        "left": _LEFT,
        "right": _RIGHT,
        "last": last,
        "time": line.time_ns,
        "allocated": line.allocated_bytes,
        "reserved": line.reserved_bytes,
        "categories": [[LABELS[name], shown[name]] for name in CATEGORIES if name in shown],
    }
    memory_data = json.dumps(data, separators=(",", ":"))
    return drawing(_WIDTH, _HEIGHT, f"Memory through {line.of}", parts, memory=memory_data)


def draw_moments(memory: Memory) -> Markup:
    """Stacked columns where only some moments of the step are known."""
    moments = [moment for moment in memory.moments if _held(moment)]
    if not moments:
        return Markup("")
    top = max(
        max(sum(held for _, held in _held(moment)), moment.reserved_bytes or 0)
        for moment in moments
    )
    room = (_RIGHT - _LEFT) / len(moments)
    wide = min(130.0, room * 0.62)
    parts = _levels(top, _RIGHT)
    for place, moment in enumerate(moments):
        middle = _LEFT + room * (place + 0.5)
        floor = 0
        for name, held in _held(moment):
            y, base = _y(floor + held, top), _y(floor, top)
            title = f"{moment.name}: {LABELS[name]} {size(held)}"
            left, height = middle - wide / 2, max(base - y, 0.4)
            parts.append(rect(f"m-{name}", left, y, wide, height, title=title))
            floor += held
        parts += _column_words(moment, middle, wide, floor, top)
    return drawing(_WIDTH, _HEIGHT, "Memory at the moments of a step", parts)


def _column_words(moment: Moment, middle: float, wide: float, held: int, top: float) -> list[str]:
    tick = "tick is-middle" + (" is-peak" if moment.name == "peak" else "")
    parts = [
        text("value is-middle", middle, _y(held, top) - 7, size(held)),
        text(tick, middle, _BOTTOM + 18, moment.name),
    ]
    if moment.reserved_bytes:
        y, half = _y(moment.reserved_bytes, top), wide / 2 + 8
        parts.append(path("reserved", [(middle - half, y), (middle + half, y)]))
    return parts


def draw_batches(fit: LargestBatch, peak_bytes: int) -> Markup:
    """The peak against the batch with its band, the limit, the batch now and the largest."""
    far = _farthest(fit)
    factors = [far * i / _POINTS for i in range(_POINTS + 1)]
    curve = [peak_at(fit.lines, times) for times in factors]
    top = float(max(high for _, _, high in curve))
    if fit.limit_bytes is not None:
        top = max(top, fit.limit_bytes * 1.06)
    right = _HALF - 16

    def x(times: float) -> float:
        return _LEFT + (right - _LEFT) * times / far

    middle, low, high = (
        [(x(times), _y(ends[i], top)) for times, ends in zip(factors, curve, strict=True)]
        for i in range(3)
    )
    parts = [
        *_levels(top, right),
        path("band", [*high, *reversed(low)], closed=True),
        path("curve", middle),
    ]
    if fit.limit_bytes is not None:
        parts += _limit_line(fit, x, right, top)
    now = "now" if fit.batch is None else f"now, {fit.batch:,}"
    y = _y(peak_bytes, top)
    parts += [
        circle("now", x(1), y, 4.5, title=f"{now}: {size(peak_bytes)}"),
        text("value", x(1) + 9, y + 12, now),
        *_batches(fit, far, x),
    ]
    return drawing(_HALF, _HEIGHT, "Peak memory against the batch", parts)


def _farthest(fit: LargestBatch) -> float:
    if fit.factor_high is not None:
        return max(1.5, fit.factor_high * 1.08)
    return max(4.0, (fit.factor or 0.0) * 1.2)


def _limit_line(
    fit: LargestBatch, x: Callable[[float], float], right: float, top: float
) -> list[str]:
    limit = fit.limit_bytes or 0
    y = _y(limit, top)
    parts = [
        path("limit", [(_LEFT, y), (right, y)]),
        text("limit-word", _LEFT + 6, y - 6, f"limit {size(limit)}"),
    ]
    if fit.factor is not None and fit.factor_low is not None:
        high = fit.factor_high if fit.factor_high is not None else fit.factor
        left, wide = x(fit.factor_low), max(1.0, x(high) - x(fit.factor_low))
        parts.append(rect("fits", left, _TOP, wide, _BOTTOM - _TOP))
        parts.append(path("largest", [(x(fit.factor), _TOP), (x(fit.factor), _BOTTOM)]))
        words = f"{fit.largest:,}" if fit.largest is not None else f"{factor(fit.factor)}x"
        parts.append(text("value is-middle is-strong", x(fit.factor), _TOP - 9, words))
    return parts


def _batches(fit: LargestBatch, far: float, x: Callable[[float], float]) -> list[str]:
    """Round batches under the axis; multiples of now where the batch is not known."""
    unit = fit.batch or 1
    suffix = "" if fit.batch else "x"
    return [
        text("tick is-middle", x(value / unit), _BOTTOM + 18, f"{value:,g}{suffix}")
        for value in round_values(far * unit, 6)
    ] + [text("unit is-end", _HALF - 16, _HEIGHT - 4, "batch")]


def _held(moment: Moment) -> list[tuple[str, int]]:
    return [(name, held) for name in CATEGORIES if (held := moment.categories.get(name))]


def _area(
    name: str, time: Sequence[int], floor: Sequence[int], roof: Sequence[int], last: int, top: float
) -> str:
    upper = _steps(time, roof, last, top)
    lower = _steps(time, floor, last, top)
    title = LABELS.get(name, "allocated")
    return path(f"m-{name}", [*upper, *reversed(lower)], closed=True, title=title)


def _steps(time: Sequence[int], level: Sequence[int], last: int, top: float) -> list[Point]:
    """Memory stays the same until the next event; points that draw nothing are left out."""
    points: list[Point] = []
    for at, value in zip(time, level, strict=True):
        x, y = round(_x(at, last), 1), round(_y(value, top), 1)
        if points and points[-1][1] != y:
            points.append((x, points[-1][1]))
        if not points or points[-1] != (x, y):
            points.append((x, y))
    points.append((float(_RIGHT), points[-1][1]))
    return points


def _phase_bands(line: MemoryTimeline, last: int) -> list[str]:
    parts = []
    for phase in line.phases:
        left, right = _x(phase.start_ns, last), _x(phase.start_ns + phase.dur_ns, last)
        parts.append(path("phase", [(left, _TOP - 6), (left, _BOTTOM)]))
        if right - left > 60:
            parts.append(text("unit", left + 4, _TOP - 10, phase.name))
    return parts


def _peak_mark(line: MemoryTimeline, last: int, top: float) -> str:
    place = max(range(len(line.time_ns)), key=lambda i: line.allocated_bytes[i])
    x, y = _x(line.time_ns[place], last), _y(line.allocated_bytes[place], top)
    side, anchor = (-9.0, " is-end") if x > (_LEFT + _RIGHT) / 2 else (9.0, "")
    words = f"peak {size(line.allocated_bytes[place])}"
    name = text(f"value is-strong{anchor}", x + side, max(_TOP + 4, y - 6), words)
    return circle("peak", x, y, 4.5) + name


def _times(last: int) -> list[str]:
    if last < 10_000:  # a history without times is drawn by event
        return [text("unit is-end", _RIGHT, _HEIGHT - 4, counted(last, "event"))]
    return [
        text("tick is-middle", _x(at, last), _BOTTOM + 18, short_tick(duration(at)))
        for at in round_values(last, 8)
    ]


def _levels(top: float, right: float) -> list[str]:
    parts = []
    for value in [0.0, *round_values(top, _MOST_LEVELS)]:
        y = _y(value, top)
        parts.append(path("grid", [(_LEFT, y), (right, y)]))
        parts.append(text("level", _LEFT - 8, y, short_tick(size(value))))
    return parts


def _x(at: float, last: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * at / last


def _y(value: float, top: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * value / top if top else float(_BOTTOM)
