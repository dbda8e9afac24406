"""The collectives laboratory's page: time against size, crossovers, and schedules step by step."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.records.collectives.algorithms import ALGORITHMS, build_schedule
from stepscope.records.figures import binary_size, duration, percent, significant
from stepscope.ui.html.render import render_page, write_atomically
from stepscope.ui.html.schedule_diagram import MOST_RANKS, draw_schedule
from stepscope.ui.html.svg import LogAxes, circle, drawing, log_levels, path, short_tick
from stepscope.ui.laboratory import (
    algorithm_name,
    crossover_words,
    crossovers_right,
    kinds_of,
    laboratory_answer,
    link_rows,
    of_kind,
)

if TYPE_CHECKING:
    from pathlib import Path

    from markupsafe import Markup

    from stepscope.records.laboratory import AlgorithmTimes, LaboratoryReport

_WIDTH, _HEIGHT = 620, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 600, 12, 336
_MOST_TICKS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSeries:
    """One algorithm in a chart's caption and table."""

    name: str
    color: str
    formula: str
    steps: str
    sent: str
    error: str
    times: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmChart:
    """One collective."""

    title: str
    sizes: list[str]
    series: list[AlgorithmSeries]
    svg: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFigure:
    """One algorithm's steps."""

    id: str
    title: str
    steps: int
    svg: Markup


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
        facts=_facts(report),
        link=link_rows(report),
        charts=[draw_times(report, kind) for kind in kinds_of(report)],
        crossovers=[(one.kind, *crossover_words(one)) for one in report.crossovers],
        right=crossovers_right(report.crossovers),
        figures=draw_figures(report),
        ranks=report.world_size,
    )
    write_atomically(file, page)


def draw_figures(report: LaboratoryReport) -> list[ScheduleFigure]:
    """Every algorithm's all-reduce, with the job's ranks or as many as fit."""
    ranks = min(report.world_size, MOST_RANKS)
    groups = report.groups if ranks == report.world_size else None
    schedules = [build_schedule(name, "all_reduce", ranks, groups) for name in ALGORITHMS]
    return [
        ScheduleFigure(
            id=schedule.algorithm,
            title=f"{algorithm_name(schedule.algorithm)} all_reduce, {ranks} ranks",
            steps=len(schedule.steps),
            svg=draw_schedule(schedule),
        )
        for schedule in schedules
    ]


def draw_times(report: LaboratoryReport, kind: str) -> AlgorithmChart:
    """Dots are measured, lines are the formula; the backend's own dots are joined by dashes."""
    algorithms = of_kind(report, kind)
    axes = _axes(algorithms)
    parts = axes.grid_x(_ticks(axes), lambda value: binary_size(value))
    levels = log_levels(axes.y_low, axes.y_high, 8)
    parts += axes.grid_y(levels, lambda value: short_tick(duration(value)))
    parts += axes.frame(_HEIGHT, "bytes of the vector", "time")
    parts += [_draw(times, axes) for times in algorithms]
    for one in report.crossovers:
        if one.kind == kind and one.measured_bytes:
            x = axes.x(one.measured_bytes)
            words = f"measured crossover, {' '.join(crossover_words(one)[:1])}"
            parts.append(path("crossing", [(x, _TOP), (x, _BOTTOM)], title=words))
    return AlgorithmChart(
        title=kind,
        sizes=[binary_size(one.size_bytes) for one in algorithms[0].sizes],
        series=[_series(times) for times in algorithms],
        svg=drawing(_WIDTH, _HEIGHT, f"{kind}: time by size and algorithm", parts),
    )


def _color(algorithm: str) -> str:
    return f"a-{algorithm}" if algorithm in ALGORITHMS else "a-backend"


def _series(times: AlgorithmTimes) -> AlgorithmSeries:
    return AlgorithmSeries(
        name=algorithm_name(times.algorithm),
        color=_color(times.algorithm),
        formula=times.formula or "the backend's own",
        steps="" if times.steps is None else str(times.steps),
        sent="" if times.sent is None else f"{significant(times.sent)} n",
        error="" if times.error is None else percent(times.error),
        times=[duration(one.time_ns) for one in times.sizes],
    )


def _axes(algorithms: list[AlgorithmTimes]) -> LogAxes:
    sizes = [one for times in algorithms for one in times.sizes]
    expected = [one.predicted_ns for one in sizes if one.predicted_ns]
    return LogAxes(
        left=_LEFT,
        right=_RIGHT,
        top=_TOP,
        bottom=_BOTTOM,
        x_low=min(one.size_bytes for one in sizes) / 1.3,
        x_high=max(one.size_bytes for one in sizes) * 1.3,
        y_low=min([one.low_ns for one in sizes] + expected) / 1.2,
        y_high=max([one.high_ns for one in sizes] + expected) * 1.2,
    )


def _ticks(axes: LogAxes) -> list[float]:
    powers = range(math.ceil(math.log2(axes.x_low)), int(math.log2(axes.x_high)) + 1)
    return [float(1 << power) for power in powers[:: max(1, -(-len(powers) // _MOST_TICKS))]]


def _draw(times: AlgorithmTimes, axes: LogAxes) -> str:
    measured = [(axes.x(one.size_bytes), axes.y(max(1, one.time_ns))) for one in times.sizes]
    expected = [
        (axes.x(one.size_bytes), axes.y(one.predicted_ns))
        for one in times.sizes
        if one.predicted_ns
    ]
    parts = [path("line", expected) if expected else path("line is-dashed", measured)]
    for (x, y), one in zip(measured, times.sizes, strict=True):
        said = f", formula {duration(one.predicted_ns)}" if one.predicted_ns else ""
        title = (
            f"{algorithm_name(times.algorithm)}, {binary_size(one.size_bytes)}: "
            f"{duration(one.time_ns)} ({duration(one.low_ns)} to {duration(one.high_ns)}){said}"
        )
        parts.append(circle("dot", x, y, 3.2, title=title))
    return f'<g class="{_color(times.algorithm)}">{"".join(parts)}</g>'


def _facts(report: LaboratoryReport) -> list[tuple[str, str]]:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(report.when_unix))
    return [
        ("Host", report.host),
        ("Device", report.device),
        ("torch", report.torch),
        ("Ranks", str(report.world_size)),
        ("Hosts", str(len(report.hosts))),
        ("Backend", report.backend),
        ("Checked against torch", str(report.checked)),
        ("Measured", when),
    ]
