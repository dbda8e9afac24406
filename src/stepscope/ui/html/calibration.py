"""Write the pages of a calibration and of the collectives laboratory: measured and predicted
times on log axes, and schedules step by step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

from stepscope.records.collective_schedules import (
    ALGORITHMS,
    CollectiveSchedule,
    Transfer,
    build_schedule,
    runs,
    simulate,
    start_of,
)
from stepscope.records.hardware import AlgorithmTimes, CollectiveFit, LaboratoryReport, Profile
from stepscope.text.figures import binary_size, duration, percent, signed_percent, significant
from stepscope.text.words import counted
from stepscope.ui.html.render import render_page, write_atomically
from stepscope.ui.html.svg import LogAxes, circle, drawing, log_levels, path, rect, short_tick, text
from stepscope.ui.topics.measurements import (
    algorithm_name,
    algorithm_table,
    calibration_answer,
    collective_table,
    contention_sentence,
    crossover_table,
    crossover_words,
    crossovers_right,
    kinds_of,
    laboratory_answer,
    link_rows,
    machine_rows,
    of_kind,
)

_COLORS = {
    "world": "compute",
    "pairs": "comm",
    "intra-host": "memory",
    "inter-host": "data_loading",
}
_WIDTH, _HEIGHT = 440, 320
_LEFT, _RIGHT = 52, 416
_TOP, _BOTTOM = 10, 216  # of the times
_ERRORS_TOP, _ERRORS_BOTTOM = 242, 296
_MOST_TICKS = 5
_POINTS = 48  # of a predicted line: straight lines bend on log axes
_LEAST_ERROR, _MOST_ERROR = 0.1, 1.0  # the error axis ends between these


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
    facts = [("Host", profile.host), ("Device", profile.device), ("torch", profile.torch)]
    if profile.backend:
        facts += [("Ranks", str(profile.world_size)), ("Backend", profile.backend)]
    page = render_page(
        "calibration.html.j2",
        styles=["report.css", "calibration.css"],
        title=words.verdict,
        links=links if charts else links[:2],
        words=words,
        facts=[*facts, ("Measured", _when(profile.when_unix))],
        machine=machine_rows(profile),
        charts=charts,
        table=collective_table(profile).for_page(),
        beside=contention_sentence(profile),
        refused=list(profile.not_offered.items()),
    )
    write_atomically(file, page)


def _when(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


def draw_charts(fits: Sequence[CollectiveFit]) -> list[dict[str, Any]]:
    """One for each kind of collective, with all groups in it."""
    return [
        _chart(kind, [fit for fit in fits if fit.kind == kind])
        for kind in dict.fromkeys(fit.kind for fit in fits)
    ]


def _chart(kind: str, fits: list[CollectiveFit]) -> dict[str, Any]:
    axes = _axes(fits)
    parts, series = _grid(axes), []
    for fit in fits:
        color = _COLORS.get(fit.group, "compute")
        parts.append(f'<g class="s-{color}">{_draw_errors(fit, axes)}{_draw_times(fit, axes)}</g>')
        rates = " → ".join(
            significant(1 / segment.beta_ns_per_byte) if segment.beta_ns_per_byte else "flat"
            for segment in fit.segments
        )
        series.append(
            {
                "color": color,
                "group": f"{fit.group}, {counted(fit.group_size, 'rank')}",
                "formula": f"{duration(fit.latency_ns)} + bytes / {rates} GB/s",
                "error": f"off by {percent(fit.held_out)}, noise {percent(fit.noise)}",
            }
        )
    title = f"{kind}: predicted and measured time by size"
    return {"title": kind, "series": series, "svg": drawing(_WIDTH, _HEIGHT, title, parts)}


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
    # Powers of two at equal steps, the last one among them where a step allows it.
    powers = _powers_of_two(axes)
    last = len(powers) - 1
    steps = range(max(1, math.ceil(last / (_MOST_TICKS - 1))), last + 2)
    step = next((step for step in steps[:4] if last % step == 0), steps[0])
    parts = []
    for power in powers[::step]:
        x = axes.x(1 << power)
        parts.append(path("grid", [(x, _TOP), (x, _BOTTOM)]))
        parts.append(path("grid", [(x, _ERRORS_TOP), (x, _ERRORS_BOTTOM)]))
        parts.append(text("tick", x, _HEIGHT - 6, binary_size(1 << power)))
    levels = [(axes.y(ns), short_tick(duration(ns))) for ns in _levels(axes)]
    for error in (axes.largest_error, 0.0, -axes.largest_error):
        words = signed_percent(error).replace("-", "−") if error else "0"
        levels.append((axes.y_error(error), words))
    for y, words in levels:
        parts.append(path("grid", [(_LEFT, y), (_RIGHT, y)]))
        parts.append(text("level", _LEFT - 7, y, words))
    parts.append(text("", _LEFT + 3, _ERRORS_TOP - 5, "error of the prediction"))
    parts += [path("frame", [(_LEFT, y), (_RIGHT, y)]) for y in (_BOTTOM, _ERRORS_BOTTOM)]
    return parts


def _powers_of_two(axes: LogAxes) -> range:
    return range(math.ceil(math.log2(axes.x_low)), int(math.log2(axes.x_high)) + 1)


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


# The collectives laboratory's page: time against size, crossovers, and schedules step by step.

_TIMES_WIDTH, _TIMES_HEIGHT = 620, 380
_TIMES_BOX = {"left": 62, "right": 600, "top": 12, "bottom": 336}
_MOST_SIZES = 6


def write_laboratory(report: LaboratoryReport, file: Path) -> None:
    words = laboratory_answer(report)
    links = [("verdict", "Verdict"), ("times", "Times"), ("crossovers", "Crossovers")]
    page = render_page(
        "laboratory.html.j2",
        styles=["report.css", "calibration.css", "laboratory.css"],
        scripts=["laboratory_page"],
        title=words.verdict,
        links=[*links, ("steps", "Step by step")],
        words=words,
        facts=[
            ("Host", report.host),
            ("Device", report.device),
            ("torch", report.torch),
            ("Ranks", str(report.world_size)),
            ("Hosts", str(len(report.hosts))),
            ("Backend", report.backend),
            ("Checked against torch", str(report.checked)),
            ("Measured", _when(report.when_unix)),
        ],
        link=link_rows(report),
        charts=[_draw_times_of(report, kind) for kind in kinds_of(report)],
        crossovers=crossover_table(report).for_page(),
        right=crossovers_right(report.crossovers),
        figures=_draw_figures(report),
    )
    write_atomically(file, page)


def _draw_figures(report: LaboratoryReport) -> list[dict[str, Any]]:
    """Every algorithm's all-reduce, with the job's ranks or as many as fit."""
    ranks = min(report.world_size, MOST_RANKS)
    groups = report.groups if ranks == report.world_size else None
    schedules = [build_schedule(name, "all_reduce", ranks, groups) for name in ALGORITHMS]
    return [
        {
            "id": schedule.algorithm,
            "title": f"{algorithm_name(schedule.algorithm)} all_reduce, {ranks} ranks",
            "steps": len(schedule.steps),
            "svg": draw_schedule(schedule),
        }
        for schedule in schedules
    ]


def _draw_times_of(report: LaboratoryReport, kind: str) -> dict[str, Any]:
    """Dots are measured, lines are the formula; the backend's own dots are joined by dashes."""
    algorithms = of_kind(report, kind)
    sizes = [one for times in algorithms for one in times.sizes]
    expected = [one.predicted_ns for one in sizes if one.predicted_ns]
    axes = LogAxes(
        **_TIMES_BOX,
        x_low=min(one.size_bytes for one in sizes) / 1.3,
        x_high=max(one.size_bytes for one in sizes) * 1.3,
        y_low=min([one.low_ns for one in sizes] + expected) / 1.2,
        y_high=max([one.high_ns for one in sizes] + expected) * 1.2,
    )
    powers = _powers_of_two(axes)
    ticks = [1 << power for power in powers[:: max(1, -(-len(powers) // _MOST_SIZES))]]
    parts = axes.grid_x(ticks, binary_size)
    levels = log_levels(axes.y_low, axes.y_high, 8)
    parts += axes.grid_y(levels, lambda value: short_tick(duration(value)))
    parts += axes.frame(_TIMES_HEIGHT, "bytes of the vector", "time")
    parts += [_draw(times, axes) for times in algorithms]
    for one in report.crossovers:
        if one.kind == kind and one.measured_bytes:
            x = axes.x(one.measured_bytes)
            words = f"measured crossover, {crossover_words(one)[0]}"
            parts.append(path("crossing", [(x, axes.top), (x, axes.bottom)], title=words))
    return {
        "title": kind,
        "colors": [_color(times.algorithm) for times in algorithms],
        "table": algorithm_table(algorithms, range(len(algorithms[0].sizes))).for_page(),
        "svg": drawing(_TIMES_WIDTH, _TIMES_HEIGHT, f"{kind}: time by size and algorithm", parts),
    }


def _color(algorithm: str) -> str:
    return f"a-{algorithm}" if algorithm in ALGORITHMS else "a-backend"


def _draw(times: AlgorithmTimes, axes: LogAxes) -> str:
    measured = [(axes.x(one.size_bytes), axes.y(max(1, one.time_ns))) for one in times.sizes]
    expected = [
        (axes.x(one.size_bytes), axes.y(one.predicted_ns))
        for one in times.sizes
        if one.predicted_ns
    ]
    parts = [path("line", expected) if expected else path("line is-dashed", measured)]
    for (x, y), one in zip(measured, times.sizes, strict=True):
        formula = f", formula {duration(one.predicted_ns)}" if one.predicted_ns else ""
        title = (
            f"{algorithm_name(times.algorithm)}, {binary_size(one.size_bytes)}: "
            f"{duration(one.time_ns)} ({duration(one.low_ns)} to {duration(one.high_ns)}){formula}"
        )
        parts.append(circle("dot", x, y, 3.2, title=title))
    return f'<g class="{_color(times.algorithm)}">{"".join(parts)}</g>'


# A schedule as a picture: a column for each rank, time downwards, an arrow for each message.
#
# Boxes are chunks; the digits in them are the ranks whose data is summed there, found by running
# the schedule with symbols. It draws the same objects that the ranks run.

_BOX, _HIGH, _GAP = 34, 20, 26  # a chunk's width and height; between ranks
_FIRST_RANK_X, _FIRST_ROUND_Y, _ROW = 70, 46, 66
_SHADES = 4
MOST_RANKS = 8


def draw_schedule(schedule: CollectiveSchedule) -> Markup:
    """Up to eight ranks; more would not fit a page."""
    states = list(simulate(schedule))
    width = _FIRST_RANK_X + schedule.ranks * (schedule.chunks * _BOX + _GAP)
    height = _FIRST_ROUND_Y + len(schedule.steps) * _ROW + _HIGH + 14
    parts = [
        text("diagram-rank is-middle", _x(schedule, rank, schedule.chunks / 2), 16, f"rank {rank}")
        for rank in range(schedule.ranks)
    ]
    parts += [
        text("diagram-chunk is-middle", _x(schedule, rank, chunk + 0.5), 36, f"c{chunk}")
        for rank in range(schedule.ranks)
        for chunk in range(schedule.chunks)
    ]
    parts.append(_state(schedule, 0, states[0], start_of(schedule)))
    for number, (before, after) in enumerate(pairwise(states), start=1):
        arrows = "".join(_arrow(schedule, number, one) for one in schedule.steps[number - 1])
        row = _state(schedule, number, after, before)
        parts.append(f'<g data-step="{number}">{arrows}{row}</g>')
    title = (
        f"{schedule.algorithm} {schedule.kind} over {schedule.ranks} ranks: who sends which chunk "
        "in each step"
    )
    return drawing(width, height, title, parts)


def contribution_words(ranks: frozenset[int]) -> str:
    """0, 0-2, 0 2-3: the ranks in a sum, neighbours joined."""
    spans = runs(sorted(ranks))
    return " ".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in spans)


def _state(
    schedule: CollectiveSchedule,
    row: int,
    held: list[list[frozenset[int]]],
    before: list[list[frozenset[int]]],
) -> str:
    """All ranks' chunks; those that changed have a frame."""
    y = _FIRST_ROUND_Y + row * _ROW
    parts = [text("diagram-step", 4, y + _HIGH / 2 + 4, f"step {row}" if row else "start")]
    for rank, chunks in enumerate(held):
        for chunk, ranks in enumerate(chunks):
            x = _x(schedule, rank, chunk)
            shade = -(-_SHADES * len(ranks) // schedule.ranks)
            new = " is-new" if ranks != before[rank][chunk] else ""
            words = contribution_words(ranks)
            title = f"rank {rank}, chunk {chunk}: " + (f"sum of {words}" if words else "empty")
            kind = f"diagram-box shade-{shade}{new}"
            parts.append(rect(kind, x + 1, y, _BOX - 2, _HIGH, rx=3, title=title))
            parts.append(text("diagram-sum is-middle", x + _BOX / 2, y + _HIGH / 2 + 4, words))
    return "".join(parts)


def _arrow(schedule: CollectiveSchedule, row: int, message: Transfer) -> str:
    """From the middle of each run of chunks to the same chunks of the target."""
    kind, what = ("diagram-add", "adds") if message.adds else ("diagram-copy", "keeps")
    top, bottom = _FIRST_ROUND_Y + (row - 1) * _ROW + _HIGH + 2, _FIRST_ROUND_Y + row * _ROW - 3
    parts = []
    for first, end in runs(message.chunks):
        middle = (first + end) / 2
        source, target = (_x(schedule, rank, middle) for rank in (message.source, message.target))
        chunks = f"chunk {first}" if end == first + 1 else f"chunks {first}-{end - 1}"
        title = f"rank {message.source} → rank {message.target}, which {what} {chunks}"
        parts.append(path(kind, [(source, top), (target, bottom)], title=title))
        head = [(target - 4, bottom - 5), (target, bottom + 1), (target + 4, bottom - 5)]
        parts.append(path(f"{kind} is-head", head, closed=True))
    return "".join(parts)


def _x(schedule: CollectiveSchedule, rank: int, chunk: float) -> float:
    return _FIRST_RANK_X + rank * (schedule.chunks * _BOX + _GAP) + chunk * _BOX
