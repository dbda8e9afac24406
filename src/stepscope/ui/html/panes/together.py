"""Training through a parameter server: who waits, how stale reads are, and whether it pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from stepscope.explain.parameter_server import describe_staleness
from stepscope.records.parameter_server import LossPoint, TogetherSummary
from stepscope.text.figures import duration, percent, significant
from stepscope.ui.html.pane import Pane, ReportData
from stepscope.ui.html.svg import drawing, path, rect, round_values, short_tick, text
from stepscope.ui.topics.whatif import (
    PARTS,
    block_table,
    histogram_rows,
    server_table,
    together_line,
    worker_table,
)

if TYPE_CHECKING:
    Curve = Sequence[tuple[float, float]]

_WIDTH = 560.0
_ROW, _BAR, _NAMES = 24.0, 16.0, 78.0
_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 220.0, 68.0, 548.0, 14.0, 184.0


def _worker_bars(summary: TogetherSummary) -> Markup:
    """One bar per worker: its mean step, divided."""
    longest = max(worker.whole_ns / worker.steps for worker in summary.workers)
    scale = (_WIDTH - _NAMES - 70) / max(longest, 1.0)
    parts = []
    for row, worker in enumerate(summary.workers):
        y, x = row * _ROW + 4, _NAMES
        parts.append(text("level", _NAMES - 8, y + 12, f"worker {worker.worker}"))
        for name, words in PARTS.items():
            mean = getattr(worker, f"{name}_ns") / worker.steps
            title = f"{words}: {duration(mean)}, {percent(mean * worker.steps / worker.whole_ns)}"
            parts.append(rect(f"part-{name}", x, y, mean * scale, _BAR, title=title))
            x += mean * scale
        parts.append(text("value", x + 6, y + 12, duration(worker.whole_ns / worker.steps)))
    height = len(summary.workers) * _ROW + 4
    return drawing(_WIDTH, height, "Mean step of each worker, divided", parts)


def _staleness_bars(summary: TogetherSummary) -> Markup | None:
    """How many pulls read parameters that were so many steps behind."""
    rows = histogram_rows(summary.staleness)
    if not rows:
        return None
    most = max(count for _, count in rows)
    width = (_RIGHT - _LEFT) / len(rows)
    parts = []
    for place, (words, count) in enumerate(rows):
        height = (_BOTTOM - _TOP) * count / most
        x = _LEFT + place * width
        title = f"{words} steps behind: {count:,} pulls, {percent(count / summary.staleness.pulls)}"
        bar = rect("stale", x + 2, _BOTTOM - height, width - 4, height, rx=2, title=title)
        parts += [bar, text("tick is-middle", x + width / 2, _BOTTOM + 18, words)]
    parts.append(text("level is-unit", _RIGHT, _HEIGHT - 4, "steps behind when read"))
    return drawing(_WIDTH, _HEIGHT, "Staleness of reads", parts)


def draw_curves(curves: dict[str, Curve], x_name: str, y_name: str = "loss") -> Markup:
    """Several curves on one pair of axes, each with its name at its end."""
    every = [point for curve in curves.values() for point in curve]
    last = max(x for x, _ in every) or 1.0
    low, high = min(y for _, y in every), max(y for _, y in every)
    spread = (high - low) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = x / last, (y - low) / spread
        return _LEFT + (_RIGHT - _LEFT) * across, _BOTTOM - (_BOTTOM - _TOP) * up

    parts = []
    for x in round_values(last, 5):
        at, _ = place(x, low)
        parts.append(path("grid", [(at, _TOP), (at, _BOTTOM)]))
        parts.append(text("tick is-middle", at, _BOTTOM + 18, short_tick(significant(x))))
    for y in (low, low + spread / 2, low + spread):
        _, at = place(0.0, y)
        parts.append(path("grid", [(_LEFT, at), (_RIGHT, at)]))
        parts.append(text("level", _LEFT - 8, at + 4, short_tick(significant(y))))
    for number, (name, curve) in enumerate(curves.items()):
        parts.append(path(f"curve is-{number}", [place(x, y) for x, y in curve], title=name))
        if name:
            parts.append(text(f"name is-{number}", _RIGHT - 6, _TOP + 14 + 15 * number, name))
    corners = [(_LEFT, _TOP), (_LEFT, _BOTTOM), (_RIGHT, _BOTTOM)]
    parts += [path("frame", corners), text("level is-unit", _RIGHT, _HEIGHT - 4, x_name)]
    parts.append(text("unit", _LEFT + 6, _TOP + 6, y_name))
    return drawing(_WIDTH, _HEIGHT, f"{y_name} over {x_name}", parts)


_MOST_MATRIX = 16  # workers; with more, pairs are listed


def together_view(report: ReportData) -> dict[str, Any] | None:
    summary = report.explanation.together
    if summary is None:
        return None
    faults = []
    if summary.evicted:
        faults.append(f"evicted workers: {', '.join(map(str, summary.evicted))}")
    if summary.restored:
        faults.append(
            f"restored shards: {', '.join(map(str, summary.restored))}; updates lost with them: "
            f"{summary.lost_updates:,}"
        )
    across: dict[str, Callable[[LossPoint], float]] = {
        "seconds": lambda point: point.s,
        "updates": lambda point: float(point.updates),
    }
    finite = [point for point in summary.losses if math.isfinite(point.loss)]
    return {
        "summary": summary,
        "headline": together_line(summary),
        "staleness_words": "; ".join(describe_staleness(summary)),
        "parts": list(PARTS.items()),
        "bars": _worker_bars(summary),
        "staleness": _staleness_bars(summary),
        "blocks": _matrix(summary),
        "pairs": block_table(summary.blocks[:_MOST_MATRIX]).for_page(),
        "shards": server_table(summary.shards).for_page(),
        "bytes": worker_table(summary.workers).for_page(),
        "losses": [
            draw_curves({"": [(value(point), point.loss) for point in finite]}, name)
            for name, value in across.items()
            if len(finite) > 1
        ],
        "faults": faults,
    }


def _matrix(summary: TogetherSummary) -> dict[str, Any] | None:
    """Rows wait, columns are waited for; the shade is the share of the longest."""
    workers = [worker.worker for worker in summary.workers]
    if not summary.blocks or len(workers) > _MOST_MATRIX:
        return None
    blocked = {(pair.worker, pair.by): pair.blocked_ns for pair in summary.blocks}
    most = max(blocked.values())

    def cell(worker: int, other: int) -> tuple[str, int]:
        ns = blocked.get((worker, other))
        return ("", 0) if ns is None else (duration(ns), round(100 * ns / most))

    rows = [(worker, [cell(worker, other) for other in workers]) for worker in workers]
    return {"workers": workers, "rows": rows}


PANE = Pane(id="together", title="Server", order=33, view=together_view)
