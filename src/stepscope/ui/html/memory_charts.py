"""Memory as SVG: through a step, at its moments, and against the batch."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from stepscope.explain.memory.batch import peak_at
from stepscope.explain.memory.words import LABELS
from stepscope.records.figures import duration, size, trimmed
from stepscope.records.memory import CATEGORIES
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.memory import LargestBatch, Memory, MemoryTimeline, Moment

    Point = tuple[float, float]

_WIDTH, _HEIGHT = 1160, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 1146, 26, 262
_HALF = 560  # width of the batch chart
_POINTS = 60
_MOST_LEVELS = 5


def draw_timeline(memory: Memory) -> Markup:
    """Stacked areas through the step; what cannot be told apart is one area."""
    line = memory.timeline
    if line is None or len(line.time_ns) < 2:
        return Markup("")
    top = max(*line.allocated_bytes, *(line.reserved_bytes or (0,)))
    last = max(line.time_ns[-1], 1)
    shown = line.categories
    floor: tuple[int, ...] = (0,) * len(line.time_ns)
    parts = [_levels(top, _RIGHT), *_phase_bands(line, last)]
    if not shown:
        parts.append(_area("plain", line.time_ns, floor, line.allocated_bytes, last, top))
    for name in [each for each in CATEGORIES if each in shown]:
        roof = tuple(a + b for a, b in zip(floor, shown[name], strict=True))
        parts.append(_area(name, line.time_ns, floor, roof, last, top))
        floor = roof
    if line.reserved_bytes is not None:
        steps = _steps(line.time_ns, line.reserved_bytes, last, top)
        parts.append(f'<path class="reserved" d="{_joined(steps)}"/>')
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
    return _svg(_WIDTH, _HEIGHT, f"Memory through {line.of}", parts, data)


def draw_moments(memory: Memory) -> Markup:
    """Stacked columns where only some moments of the step are known."""
    moments = [each for each in memory.moments if _held(each)]
    if not moments:
        return Markup("")
    top = max(
        max(sum(held for _, held in _held(each)), each.reserved_bytes or 0) for each in moments
    )
    room = (_RIGHT - _LEFT) / len(moments)
    wide = min(130.0, room * 0.62)
    parts = [_levels(top, _RIGHT)]
    for place, each in enumerate(moments):
        middle = _LEFT + room * (place + 0.5)
        floor = 0
        for name, held in _held(each):
            y, base = _y(floor + held, top), _y(floor, top)
            words = f"{each.name}: {LABELS[name]} {size(held)}"
            parts.append(
                f'<rect class="m-{name}" x="{middle - wide / 2:.1f}" y="{y:.1f}" '
                f'width="{wide:.1f}" height="{max(base - y, 0.4):.1f}">'
                f"<title>{escape(words)}</title></rect>"
            )
            floor += held
        parts += _named_column(each, middle, wide, floor, top)
    return _svg(_WIDTH, _HEIGHT, "Memory at the moments of a step", parts)


def _named_column(each: Moment, middle: float, wide: float, held: int, top: float) -> list[str]:
    out = [
        _text("value is-middle", middle, _y(held, top) - 7, size(held)),
        _text(
            "tick is-middle" + (" is-peak" if each.name == "peak" else ""),
            middle,
            _BOTTOM + 18,
            each.name,
        ),
    ]
    if each.reserved_bytes:
        y = _y(each.reserved_bytes, top)
        left, right = middle - wide / 2 - 8, middle + wide / 2 + 8
        out.append(f'<path class="reserved" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
    return out


def draw_batches(fit: LargestBatch, peak_bytes: int) -> Markup:
    """The peak against the batch with its band, the limit, the batch now and the largest."""
    far = _farthest(fit)
    factors = [far * i / _POINTS for i in range(_POINTS + 1)]
    curve = [peak_at(fit.lines, factor) for factor in factors]
    top = float(max(high for _, _, high in curve))
    if fit.limit_bytes is not None:
        top = max(top, fit.limit_bytes * 1.06)
    right = _HALF - 16

    def x(factor: float) -> float:
        return _LEFT + (right - _LEFT) * factor / far

    low = [(x(f), _y(each[1], top)) for f, each in zip(factors, curve, strict=True)]
    high = [(x(f), _y(each[2], top)) for f, each in zip(factors, curve, strict=True)]
    middle = [(x(f), _y(each[0], top)) for f, each in zip(factors, curve, strict=True)]
    parts = [
        _levels(top, right),
        f'<path class="band" d="{_joined([*high, *reversed(low)])}Z"/>',
        f'<path class="curve" d="{_joined(middle)}"/>',
    ]
    if fit.limit_bytes is not None:
        parts += _limit_line(fit, x, right, top)
    now = "now" if fit.batch is None else f"now, {fit.batch:,}"
    y = _y(peak_bytes, top)
    parts += [
        f'<circle class="now" cx="{x(1):.1f}" cy="{y:.1f}" r="4.5"><title>{now}: '
        f"{size(peak_bytes)}</title></circle>",
        _text("value", x(1) + 9, y + 12, now),
        *_batches(fit, far, x),
    ]
    return _svg(_HALF, _HEIGHT, "Peak memory against the batch", parts)


def _farthest(fit: LargestBatch) -> float:
    if fit.factor_high is not None:
        return max(1.5, fit.factor_high * 1.08)
    return max(4.0, (fit.factor or 0.0) * 1.2)


def _limit_line(fit: LargestBatch, x: Any, right: float, top: float) -> list[str]:
    limit = fit.limit_bytes or 0
    y = _y(limit, top)
    out = [
        f'<path class="limit" d="M{_LEFT} {y:.1f}H{right}"/>',
        _text("limit-word", _LEFT + 6, y - 6, f"limit {size(limit)}"),
    ]
    if fit.factor is not None and fit.factor_low is not None:
        high = fit.factor_high if fit.factor_high is not None else fit.factor
        left, wide = x(fit.factor_low), max(1.0, x(high) - x(fit.factor_low))
        out.append(
            f'<rect class="fits" x="{left:.1f}" y="{_TOP}" width="{wide:.1f}" '
            f'height="{_BOTTOM - _TOP}"/>'
        )
        out.append(f'<path class="largest" d="M{x(fit.factor):.1f} {_TOP}V{_BOTTOM}"/>')
        words = f"{fit.largest:,}" if fit.largest is not None else f"{fit.factor:.1f}x"
        out.append(_text("value is-middle is-strong", x(fit.factor), _TOP - 9, words))
    return out


def _batches(fit: LargestBatch, far: float, x: Any) -> list[str]:
    """Round batches under the axis; where the batch is not known, times what it is."""
    unit = fit.batch or 1
    suffix = "" if fit.batch else "x"
    return [
        _text("tick is-middle", x(value / unit), _BOTTOM + 18, f"{value:,g}{suffix}")
        for value in _round_values(far * unit, 6)
    ] + [_text("unit is-end", _HALF - 16, _HEIGHT - 4, "batch")]


def _held(moment: Moment) -> list[tuple[str, int]]:
    return [(name, held) for name in CATEGORIES if (held := moment.categories.get(name))]


def _area(
    name: str,
    time: Sequence[int],
    floor: Sequence[int],
    roof: Sequence[int],
    last: int,
    top: float,
) -> str:
    upper = _steps(time, roof, last, top)
    lower = _steps(time, floor, last, top)
    return (
        f'<path class="m-{name}" d="{_joined([*upper, *reversed(lower)])}Z">'
        f"<title>{LABELS.get(name, 'allocated')}</title></path>"
    )


def _steps(time: Sequence[int], level: Sequence[int], last: int, top: float) -> list[Point]:
    """Memory stays what it is until the next event; points that draw nothing are left out."""
    out: list[Point] = []
    for at, value in zip(time, level, strict=True):
        x, y = round(_x(at, last), 1), round(_y(value, top), 1)
        if out and out[-1][1] != y:
            out.append((x, out[-1][1]))
        if not out or out[-1] != (x, y):
            out.append((x, y))
    out.append((float(_RIGHT), out[-1][1]))
    return out


def _phase_bands(line: MemoryTimeline, last: int) -> list[str]:
    out = []
    for phase in line.phases:
        left, right = _x(phase.start_ns, last), _x(phase.start_ns + phase.dur_ns, last)
        out.append(f'<path class="phase" d="M{left:.1f} {_TOP - 6}V{_BOTTOM}"/>')
        if right - left > 60:
            out.append(_text("unit", left + 4, _TOP - 10, phase.name))
    return out


def _peak_mark(line: MemoryTimeline, last: int, top: float) -> str:
    place = max(range(len(line.time_ns)), key=lambda i: line.allocated_bytes[i])
    x, y = _x(line.time_ns[place], last), _y(line.allocated_bytes[place], top)
    side, anchor = (-9.0, " is-end") if x > (_LEFT + _RIGHT) / 2 else (9.0, "")
    words = f"peak {size(line.allocated_bytes[place])}"
    return f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>' + _text(
        f"value is-strong{anchor}", x + side, max(_TOP + 4, y - 6), words
    )


def _times(last: int) -> list[str]:
    if last < 10_000:  # a history without times is drawn by event
        return [_text("unit is-end", _RIGHT, _HEIGHT - 4, counted(last, "event"))]
    return [
        _text("tick is-middle", _x(at, last), _BOTTOM + 18, trimmed(duration(at)))
        for at in _round_values(last, 8)
    ]


def _levels(top: float, right: float) -> str:
    parts = []
    for value in [0.0, *_round_values(top, _MOST_LEVELS)]:
        y = _y(value, top)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right:.1f}"/>')
        parts.append(_text("level", _LEFT - 8, y, trimmed(size(value))))
    return "".join(parts)


def _round_values(most: float, many: int) -> list[float]:
    """1, 2 or 5 times a power of ten, up to `most`."""
    if most <= 0:
        return []
    rough = most / many
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough)
    return [step * i for i in range(1, int(most / step + 1e-9) + 1)]


def _x(at: float, last: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * at / last


def _y(value: float, top: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * value / top if top else float(_BOTTOM)


def _joined(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _text(name: str, x: float, y: float, text: str) -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(
    width: int, height: int, title: str, parts: Sequence[str], data: dict[str, Any] | None = None
) -> Markup:
    """Numbers, fixed words and escaped names only."""
    told = f' data-memory="{escape(json.dumps(data, separators=(",", ":")))}"' if data else ""
    return Markup(
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"{told}>'
        f"{''.join(parts)}</svg>"
    )
