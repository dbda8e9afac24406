"""Memory: what holds the peak, memory through a step, and what batch fits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from stepscope.explain.memory.captured import peak_at
from stepscope.explain.memory.model import LABELS, RANKS
from stepscope.records.explanation import RankExplanation
from stepscope.records.memory import (
    CATEGORIES,
    SAVING_ACTIONS,
    LargestBatch,
    Memory,
    MemoryTimeline,
    Moment,
    SavedMemory,
    SavingTimeline,
    Theory,
)
from stepscope.text.figures import duration, factor, percent, size
from stepscope.text.words import counted, sentence
from stepscope.ui.html.pane import Pane, ReportData, rank_label
from stepscope.ui.html.svg import circle, drawing, path, rect, round_values, short_tick, text
from stepscope.ui.topics.device_use import (
    ACTION_LABELS,
    HINTS,
    LIMITS,
    batch_words,
    memory_headline,
    place_words,
    saving_words,
    shown_categories,
    theory_words,
    unknown_categories,
    zero_rows,
)

if TYPE_CHECKING:
    from stepscope.ui.html.svg import Point

# Memory as SVG: through a step, at its moments, and against the batch.

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


def _levels(top: float, right: float, bottom: float = _BOTTOM) -> list[str]:
    parts = []
    for value in [0.0, *round_values(top, _MOST_LEVELS)]:
        y = _y(value, top, bottom)
        parts.append(path("grid", [(_LEFT, y), (right, y)]))
        parts.append(text("level", _LEFT - 8, y, short_tick(size(value))))
    return parts


def _x(at: float, last: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * at / last


def _y(value: float, top: float, bottom: float = _BOTTOM) -> float:
    return bottom - (_BOTTOM - _TOP) * value / top if top else float(bottom)


# What save_memory did, as SVG: bytes kept for backward through a step, without the plan as areas by
# what is done with them, with the plan as a line.

_SAVING_TOP, _SAVING_BOTTOM = 30, 266
_FORWARD = 1 / 3  # of the width: backward takes about twice as long


def drawn_actions(line: SavingTimeline) -> list[str]:
    """From the bottom up: what stays first."""
    known = [action for action in SAVING_ACTIONS if any(line.before_bytes.get(action, ()))]
    return known + sorted(
        action
        for action in line.before_bytes
        if action not in SAVING_ACTIONS and any(line.before_bytes[action])
    )


def draw_saving(line: SavingTimeline | None) -> Markup:
    if line is None or not line.is_whole():
        return Markup("")
    points = len(line.after_bytes)
    places = [_saving_x(line, point) for point in range(points)]
    floor = [0] * points
    areas = []
    for action in drawn_actions(line):
        roof = [a + b for a, b in zip(floor, line.before_bytes[action], strict=True)]
        areas.append((action, floor, roof))
        floor = roof
    top = float(max(1, *floor, *line.after_bytes))
    parts = [*_levels(top, _RIGHT, _SAVING_BOTTOM), *_phases()]
    for action, low, high in areas:
        upper, lower = (_points(places, levels, top) for levels in (high, low))
        kind = action if action in SAVING_ACTIONS else "keep"
        parts.append(
            path(f"sv-{kind}", [*upper, *reversed(lower)], closed=True, title=f"{action}, before")
        )
    parts.append(path("sv-after", _points(places, line.after_bytes, top), title="with the change"))
    parts += _peak(places, floor, top, "without")
    parts += _peak(places, line.after_bytes, top, "with")
    return drawing(_WIDTH, _HEIGHT, "Bytes saved for backward, with and without the change", parts)


def _saving_x(line: SavingTimeline, point: int) -> float:
    """Forward fills the left third, backward the rest."""
    forward = min(line.forward_points, len(line.after_bytes))
    share = _FORWARD * (point + 1) / forward if point < forward else _FORWARD
    if point >= forward:
        share += (1 - _FORWARD) * (point - forward + 1) / (len(line.after_bytes) - forward)
    return _LEFT + (_RIGHT - _LEFT) * share


def _points(places: Sequence[float], levels: Sequence[int], top: float) -> list[Point]:
    heights = [_y(level, top, _SAVING_BOTTOM) for level in levels]
    start = float(_SAVING_BOTTOM) if len(levels) > 1 else heights[0]
    return [(float(_LEFT), start), *zip(places, heights, strict=True)]


def _peak(places: Sequence[float], levels: Sequence[int], top: float, which: str) -> list[str]:
    highest = max(range(len(levels)), key=lambda point: levels[point])
    x, y = places[highest], _y(levels[highest], top, _SAVING_BOTTOM)
    words = f"{size(levels[highest])} {which}"
    return [text("value is-strong", x + 8, max(_SAVING_TOP - 4, y - 6), words)]


def _phases() -> list[str]:
    middle = _LEFT + (_RIGHT - _LEFT) * _FORWARD
    return [
        path("phase", [(middle, _SAVING_TOP - 6), (middle, _SAVING_BOTTOM)]),
        text("unit", _LEFT + 4, _SAVING_BOTTOM + 18, "forward"),
        text("unit", middle + 4, _SAVING_BOTTOM + 18, "backward"),
    ]


MOST_ROWS = 10
MOST_DRAWN = 8  # ranks with charts; the others have their figures


def memory_views(report: ReportData) -> list[tuple[str, dict[str, Any] | None]] | None:
    views = [
        (rank_label(rank), memory_view(rank, drawn=place < MOST_DRAWN))
        for place, rank in enumerate(report.ranks)
    ]
    return views if any(view for _, view in views) else None


def memory_view(rank: RankExplanation, *, drawn: bool) -> dict[str, Any] | None:
    """None where nothing is known about the rank's memory."""
    memory, none = rank.memory, Markup("")
    if memory is None:
        return None
    fit, theory = memory.largest_batch, memory.theory
    timeline = draw_timeline(memory) if drawn else none
    activations = theory.activations if theory else None
    return {
        "headline": sentence(memory_headline(memory)),
        "facts": _facts(memory),
        "slices": _slices(memory),
        "unknown": ", ".join(unknown_categories(memory)) if memory.source != "snapshot" else "",
        "picture": _picture(memory),
        "timeline": timeline,
        "caption": _caption(memory),
        "moments": draw_moments(memory) if drawn and not timeline else none,
        "key": _key(memory),
        "dashed": bool(memory.reserved_bytes),
        "batches": draw_batches(fit, memory.peak_bytes) if drawn and fit else none,
        "batch_words": sentence(batch_words(fit)) if fit else "",
        "batch_from": fit.batch_from or "" if fit else "",
        "saving": _saving(memory.saving, drawn=drawn) if memory.saving else None,
        "sites": _sites(memory),
        "modules": _modules(memory),
        "zero": _zero(theory, memory.limit_bytes) if theory else [],
        "ranks": RANKS,
        "theory": sentence(theory_words(theory) or "") if theory else "",
        "formula": activations.formula if activations else "",
        "notes": (*memory.notes, *(theory.notes if theory else ())),
    }


def _facts(memory: Memory) -> list[tuple[str, str, str]]:
    facts = [("Peak", size(memory.peak_bytes), memory.measured)]
    if memory.reserved_bytes:
        facts.append(("Reserved", size(memory.reserved_bytes), "What torch took from the device"))
    if memory.fragmentation is not None:
        unused = memory.fragmentation
        hint = f"Reserved and holding nothing, at the {unused.at}"
        facts.append(("Unused", percent(unused.share), hint))
    last = memory.at_end
    if last is not None and last.largest_free_bytes is not None:
        facts.append(
            (
                "Largest free block",
                size(last.largest_free_bytes),
                f"of {last.free_blocks} at the end",
            )
        )
    if memory.limit_bytes:
        fit = memory.largest_batch
        hint = LIMITS[fit.limit_from] if fit and fit.limit_from else ""
        facts.append(("Limit", size(memory.limit_bytes), hint))
    if memory.growth is not None:
        steps = len(memory.growth.ends_bytes) - 1
        growth = memory.growth.bytes_per_step
        hint = f"Over {counted(steps, 'step')}"
        facts.append(("Growth per step", size(growth) if growth else "none", hint))
    if memory.out_of_memory:
        failed = memory.out_of_memory[-1]
        hint = f"The last one asked for {size(failed.asked_bytes)}"
        facts.append(("Failed requests", str(len(memory.out_of_memory)), hint))
    return [(label, value, sentence(hint)) for label, value, hint in facts]


def _slices(memory: Memory) -> list[dict[str, Any]]:
    whole = memory.peak_bytes or 1
    return [
        {
            "name": name,
            "label": LABELS[name].capitalize(),
            "size": size(held),
            "share": held / whole,
            "hint": HINTS[name],
        }
        for name, held in shown_categories(memory)
    ]


def _picture(memory: Memory) -> str:
    if memory.timeline is None:
        return "At the moments of the step"
    return "Through the history" if memory.source == "snapshot" else "Through the step"


def _caption(memory: Memory) -> str:
    if memory.timeline is not None:
        return f"Allocated through {memory.timeline.of}; the peak is the highest point."
    if memory.moments:
        return (
            "What is held where each phase of the step ends, and at the peak. Between these "
            "moments nothing was recorded."
        )
    return ""


def _key(memory: Memory) -> list[tuple[str, str]]:
    """Categories that the chart shows; where they cannot be separated there are none."""
    if memory.timeline is not None:
        shown = {name for name, levels in memory.timeline.categories.items() if any(levels)}
    else:
        shown = {n for moment in memory.moments for n, held in moment.categories.items() if held}
    return [(name, LABELS[name].capitalize()) for name in CATEGORIES if name in shown]


def _sites(memory: Memory) -> list[dict[str, Any]]:
    most = memory.by_site[0].size_bytes if memory.by_site else 1
    return [
        {
            "size": size(site.size_bytes),
            "bar": site.size_bytes / max(most, 1),
            "what": site.operator,
            "about": place_words(site),
            "category": site.category or "",
        }
        for site in memory.by_site[:MOST_ROWS]
    ]


def _modules(memory: Memory) -> list[dict[str, Any]]:
    most = memory.by_module[0].size_bytes if memory.by_module else 1
    return [
        {
            "size": size(module.size_bytes),
            "bar": module.size_bytes / max(most, 1),
            "what": module.module,
            "about": counted(module.tensors, "tensor"),
            "category": "activations",
        }
        for module in memory.by_module[:MOST_ROWS]
    ]


def _saving(saving: SavedMemory, *, drawn: bool) -> dict[str, Any]:
    line = saving.timeline if drawn else None
    return {
        "words": sentence(saving_words(saving)),
        "chart": draw_saving(line),
        "key": [(action, ACTION_LABELS.get(action, action)) for action in drawn_actions(line)]
        if line
        else [],
        "actions": [
            {
                "action": row.action,
                "label": ACTION_LABELS.get(row.action, row.action),
                "count": counted(row.values, "value"),
                "before": size(row.before_bytes),
                "held": size(row.held_bytes),
                "cost": duration(row.cost_ns) if row.cost_ns else "",
            }
            for row in saving.actions
        ],
        "values": [
            {
                "value": row.value,
                "module": row.module,
                "operator": row.operator,
                "size": size(row.size_bytes),
                "held": size(row.held_bytes),
                "action": row.action,
                "cost": duration(row.cost_ns) if row.cost_ns else "",
            }
            for row in saving.values[:MOST_ROWS]
        ],
        "notes": saving.notes,
    }


def _zero(theory: Theory, limit: int | None) -> list[dict[str, Any]]:
    return [
        {
            "stage": "Not sharded" if stage == 0 else f"Stage {stage}",
            "volume": f"{rows[0].volume:g}x",
            "cells": [
                (size(row.size_bytes), bool(limit and row.size_bytes > limit)) for row in rows
            ],
        }
        for stage, rows in zero_rows(theory, RANKS)
    ]


PANE = Pane(id="memory", title="Memory", order=60, view=memory_views)
