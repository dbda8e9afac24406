"""Across ranks: who is slow, every rank in every step, ranks on one clock, and bandwidth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape

from stepscope.explain.job.hosts import columns_by_host, ranks_by_host
from stepscope.records.job import (
    KINDS,
    SYNCHRONISING,
    CriticalPath,
    Job,
    JobCollective,
    Lanes,
    LastArriver,
)
from stepscope.records.quality import Note
from stepscope.records.strategies import Strategy
from stepscope.step.collectives import bus_factor
from stepscope.text.figures import duration, rate, size
from stepscope.text.words import counted, plural
from stepscope.ui.html.lanes import overlap_rows
from stepscope.ui.html.pane import Pane, ReportData, encode_block
from stepscope.ui.html.panes.tables import job_tables
from stepscope.ui.html.svg import LogAxes, circle, drawing, log_levels, path, rect, short_tick, text
from stepscope.ui.topics.distributed import (
    CAUSES,
    NOT_ALIGNED,
    clock_words,
    describe_hierarchical,
    describe_strategies,
    error_words,
    group_words,
    host_clock_words,
    no_arrivals,
    own_wait_words,
    path_words,
    place_words,
    rank_on_host,
    straggler_tone,
    straggler_words,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.ui.html.pane import Column

    Int64 = NDArray[np.int64]

# Charts about several ranks: who arrives last, and bandwidth against message size.

MOST_BARS = 12
MOST_DOTS = 400
_WIDTH = 600
_LEAST_ROW, _MOST_ROW = 23, 40
_ROOM = 300  # for all rows of arrivals
# Across: the rank, how often it was last, how long it waited.
_LAST, _LAST_END = 74, 190
_WAIT, _WAIT_END = 372, 458
_HEAD = 26
# The plot of bandwidths.
_HEIGHT = 312
_LEFT, _RIGHT = 58, 586
_SHAPES = ("circle", "diamond", "square", "triangle")


def draw_arrivals(job: Job) -> tuple[Markup, str]:
    """Bars for the ranks that arrived last most often; a sentence about the ranks left out."""
    rows = job.arrivals[: MOST_BARS if len(job.arrivals) > MOST_BARS + 4 else None]
    rest = job.arrivals[len(rows) :]
    if not any(row.times_last for row in rows):
        return Markup(""), ""
    accused = set(job.stragglers.accused)
    most = max(row.times_last for row in rows)
    longest = max((row.waits_ns for row in job.arrivals), default=0)
    parts = [
        text("tick", _LAST, 14, "arrived last"),
        text("tick", _WAIT, 14, "waited for others, per step"),
    ]
    step = max(_LEAST_ROW, min(_MOST_ROW, _ROOM // len(rows)))
    for place, row in enumerate(rows):
        top = _HEAD + place * step
        who = rank_on_host(row.rank, job)
        parts.append(_arrival(row, who, top, step, most, longest, row.rank in accused))
    height = _HEAD + len(rows) * step
    return drawing(_WIDTH, height, "How often each rank arrived last", parts), _left_out(rest)


def _arrival(
    row: LastArriver, who: str, y: int, height: int, most: int, longest: int, accused: bool
) -> str:
    last = (_LAST_END - _LAST) * row.times_last / most
    waits = (_WAIT_END - _WAIT) * row.waits_ns / longest if longest else 0.0
    lead = f", by {duration(row.lead_ns)}" if row.times_last else ""
    middle = y + height / 2
    title = (
        f"{who}: last to arrive in {row.times_last:,} of {counted(row.of, 'collective')}, "
        f"typically by {duration(row.lead_ns)}; waited {own_wait_words(row)} per step itself"
    )
    return (
        f'<g class="arrival{" is-accused" if accused else ""}"><title>{escape(title)}</title>'
        + rect("hit", 0, y, _WIDTH, height)
        + text("who", _LAST - 10, middle, f"rank {row.rank}")
        + rect("bar-last", _LAST, middle - 7.5, max(last, 1), 15, rx=2)
        + text("value", _LAST + last + 7, middle, f"{row.times_last:,} of {row.of:,}{lead}")
        + rect("bar-waits", _WAIT, middle - 7.5, max(waits, 1), 15, rx=2)
        + text("value", _WAIT + waits + 7, middle, own_wait_words(row))
        + "</g>"
    )


def _left_out(rest: Sequence[LastArriver]) -> str:
    if not rest:
        return ""
    last = sum(row.times_last for row in rest)
    others = f"The other {counted(len(rest), 'rank')} {plural(len(rest), 'was', 'were')}"
    if not last:
        return f"{others} never last by more than the clock's error bar."
    return f"{others} last {counted(last, 'time')} in total."


def draw_bandwidth(job: Job) -> tuple[Markup, list[tuple[str, str, Markup]]]:
    """A dot for each kind, group and size, the calibrated rate as a dashed line; the legend has
    kind, label and mark of each kind of collective in groups of one purpose."""
    known = [row for row in job.collectives if row.size_bytes and row.busbw_gb_s][:MOST_DOTS]
    if not known:
        return Markup(""), []
    axes = _axes(known)
    accused = {slow.group for slow in job.stragglers.ranks if slow.group is not None}
    series: dict[tuple[str, str], list[JobCollective]] = {}
    for row in known:
        purpose = row.description
        purpose = purpose or (counted(row.group_size, "rank") if row.group_size else "?")
        series.setdefault((row.kind, purpose), []).append(row)
    parts = [
        *axes.grid_x(log_levels(axes.x_low, axes.x_high, most=7), lambda v: short_tick(size(v))),
        *axes.grid_y(log_levels(axes.y_low, axes.y_high, most=6), lambda value: f"{value:g}"),
        *axes.frame(_HEIGHT, "message size", "bus bandwidth, GB/s"),
    ]
    legend = []
    for place, ((kind, _), rows) in enumerate(series.items()):
        shape = _SHAPES[place % len(_SHAPES)]
        parts.append(f'<g class="k-{escape(kind)}">{_curves(rows, axes)}')
        parts += [_dot(shape, row, axes, row.group in accused) for row in rows]
        parts.append("</g>")
        groups, members = len({row.group for row in rows}), rows[0].group_size
        name = rows[0].description or f"group {rows[0].group}"
        ranks = counted(members, "rank") if members is not None else "? ranks"
        many = f"{groups} groups of {ranks}" if groups > 1 else ranks
        legend.append((kind, f"{kind}, {name}, {many}", Markup(_mark(shape, "dot", 7, 7))))
    return drawing(_WIDTH, _HEIGHT, "Bandwidth against message size", parts), legend


def _axes(rows: Sequence[JobCollective]) -> LogAxes:
    sizes = [row.size_bytes or 1 for row in rows]
    rates = [row.busbw_gb_s or 0.0 for row in rows]
    rates += [expected for row in rows if (expected := _expected_rate(row)) is not None]
    small, large = _at_least(min(sizes), max(sizes), 16.0)
    slow, fast = _at_least(min(rates), max(rates), 8.0)
    box = {"left": _LEFT, "right": _RIGHT, "top": 10, "bottom": 274}
    return LogAxes(**box, x_low=small, x_high=large, y_low=slow, y_high=fast)


def _at_least(low: float, high: float, factor: float) -> tuple[float, float]:
    """Both ends with a margin, at least `factor` apart: equal values must not look different."""
    margin = max(1.5, math.sqrt(factor * low / high)) if high < factor * low else 1.5
    return low / margin, high * margin


def _expected_rate(row: JobCollective) -> float | None:
    if not row.expected_ns or not row.size_bytes or (row.group_size or 0) < 2:
        return None
    return row.size_bytes * bus_factor(row.kind, row.group_size or 0) / row.expected_ns


def _curves(rows: Sequence[JobCollective], axes: LogAxes) -> str:
    """Through the calibrated rates of the sizes seen; a dash where there is only one size."""
    points = sorted(
        {
            (row.size_bytes or 1, expected)
            for row in rows
            if (expected := _expected_rate(row)) is not None
        }
    )
    if not points:
        return ""
    places = [(axes.x(bytes_), axes.y(expected)) for bytes_, expected in points]
    if len(places) == 1:
        ((x, y),) = places
        places = [(max(_LEFT, x - 26), y), (min(_RIGHT, x + 26), y)]
    return path("expected", places)


def _dot(shape: str, row: JobCollective, axes: LogAxes, accused: bool) -> str:
    x, y = axes.x(row.size_bytes or 1), axes.y(row.busbw_gb_s or 0.0)
    took = (row.transfer_ns or 0) / row.count
    unsure = row.wait_error_ns is not None and took < row.wait_error_ns / row.count
    words = [
        f"{row.kind}, group {group_words(row)}: {size(row.size_bytes or 1)}, "
        f"{counted(row.count, 'time')}",
        f"busbw {rate(1e9 * (row.busbw_gb_s or 0.0), 'B/s')}, a transfer {duration(took)}",
    ]
    if row.expected_ns:
        words.append(f"calibrated {duration(row.expected_ns)}")
    if unsure:
        words.append("shorter than the clock's error bar")
    mark = _mark(shape, "dot is-unsure" if unsure else "dot", x, y)
    if accused:
        mark += circle("ring", x, y, 9)
        mark += text("accused", x + 14, y, f"group {row.group}: slow link")
    return f"<g>{mark}<title>{escape('; '.join(words))}</title></g>"


def _mark(shape: str, kind: str, x: float, y: float) -> str:
    if shape == "circle":
        return circle(kind, x, y, 4.6)
    corners = {
        "square": ((-4.2, -4.2), (4.2, -4.2), (4.2, 4.2), (-4.2, 4.2)),
        "diamond": ((0, -5.8), (5.8, 0), (0, 5.8), (-5.8, 0)),
        "triangle": ((0, -5.4), (5.4, 4.2), (-5.4, 4.2)),
    }[shape]
    return path(kind, [(x + dx, y + dy) for dx, dy in corners], closed=True)


# A job of a thousand ranks must fit in a page that opens at once: what does not fit is left out
# here, and the page says so.

MOST_CELLS = 100_000  # of the heat map: steps are left out beyond
_MOST_ROWS = 6  # in which a rank's overlapping collectives are drawn
_PATH_KINDS = ("work", "input", "transfer")

# id, label, what to look for
METRICS = (
    (
        "own",
        "Without comm",
        "Each recorded step without exposed communication: the time a rank needs by itself. A row "
        "of strong colour is a rank that the others wait for.",
    ),
    (
        "step",
        "Step time",
        "Ranks that meet in collectives take about the same time. A column of strong colour is a "
        "step that was slow on every rank.",
    ),
    (
        "comm",
        "Exposed comm",
        "Communication that does not overlap with compute: waiting for others, and the transfer. A "
        "faint row among strong ones is the rank the others wait for.",
    ),
    (
        "input",
        "Data loading",
        "Waiting for data while no work runs. A row of strong colour is a rank whose loader is too "
        "slow.",
    ),
)


def report_view(report: ReportData) -> dict[str, Any] | None:
    explanation = report.explanation
    if explanation.job is None:
        return None
    return ranks_view(
        explanation.job,
        explanation.quality,
        strategies=explanation.strategies,
        shown=len(report.ranks),
        untraced=explanation.without_trace.count if explanation.without_trace else 0,
    )


def ranks_view(
    job: Job,
    notes: Sequence[Note],
    *,
    strategies: Sequence[Strategy] = (),
    shown: int = 0,
    untraced: int = 0,
) -> dict[str, Any]:
    """What the template prints; where a `no_...` sentence is empty there is a chart.

    `shown` ranks are in the page in detail; `untraced` ones of the job recorded no trace.
    """
    steps = _shown_steps(job)
    arrivals, left_out = draw_arrivals(job)
    bandwidth, legend = draw_bandwidth(job)
    lanes, aligned = job.lanes, job.clock.aligned
    no_path = "no step was recorded by all ranks" if aligned else NOT_ALIGNED
    no_bandwidth = "Bandwidth is not known: message sizes or group sizes were not recorded."
    if not job.collectives:
        no_bandwidth = "No collective was recorded by two ranks of its group."
    return {
        "verdict": straggler_words(job.stragglers),
        "tone": straggler_tone(job.stragglers),
        "evidence": [f"{line}." for worst in job.stragglers.ranks[:1] for line in worst.evidence],
        "facts": _facts(job, untraced),
        "clock": f"{clock_words(job.clock)} {host_clock_words(job.clock)}".strip(),
        "metrics": METRICS,
        "no_heat": "" if job.steps else "No recorded step allows a comparison of ranks.",
        "steps_left_out": _steps_left_out(job, steps),
        "no_lanes": _no_lanes(job),
        "lanes_left_out": _lanes_left_out(job),
        "no_path": "" if job.path else f"The critical path is not known: {no_path}.",
        "path": path_words(job.path) if job.path else "",
        "kinds": [KINDS[code] for code in np.unique(lanes.kind).tolist()] if lanes else [],
        # Whether some calls begin later than they are made.
        "queued": bool(lanes and (lanes.start_ns > lanes.arrival_ns).any()),
        "arrivals": arrivals,
        "no_arrivals": no_arrivals(job),
        "arrivals_left_out": left_out,
        "bandwidth": bandwidth,
        "legend": legend,
        "calibrated": any(row.expected_ns for row in job.collectives),
        "no_bandwidth": "" if legend else no_bandwidth,
        "quality": [(note.id, note.detail) for note in notes],
        "strategies": [*describe_strategies(strategies), *describe_hierarchical(job.hierarchical)],
        "shown": shown,
        "all_ranks": len(job.ranks),
        "several_hosts": len(columns_by_host(job.ranks, job.hosts)) > 1,
        "payload": _payload(job, steps),
    }


def _facts(job: Job, untraced: int) -> list[tuple[str, str, str]]:
    hosts = len(set(job.hosts.values()))
    where = f"on {hosts} hosts" if hosts > 1 else "on one host" if hosts else ""
    if untraced:
        where = f"{len(job.ranks):,} of them traced, {where}".removesuffix(", ")
    facts = [("Ranks", f"{len(job.ranks) + untraced:,}", where)]
    slowest = max((times.step_ms for times in job.times), default=0.0)
    if slowest:
        step = duration(slowest * 1e6)
        facts.append(("Profiled step", step, "Of the slowest rank, their median"))
        own = [times.own_ms for times in job.times]
        low, high = (job.ranks[own.index(end)] for end in (min(own), max(own)))
        span = f"{duration(min(own) * 1e6)} to {duration(max(own) * 1e6)}"
        facts.append(
            ("Step without comm", span, f"Rank {low} the fastest, rank {high} the slowest")
        )
    if job.arrivals:
        waits = [row.waits_ns for row in job.arrivals]
        hint = f"Per step, mean of ranks, up to {duration(max(waits))}; calls may overlap"
        facts.append(("Waiting for others", duration(float(np.mean(waits))), hint))
    if job.clock.aligned:
        worst = max(job.clock.error_ns.values(), default=0)
        facts.append(("Clocks within", error_words(worst), job.clock.detail))
    else:
        hint = "Waits and arrivals are not known; durations are"
        facts.append(("Clocks", "not aligned", hint))
    return facts


def _shown_steps(job: Job) -> NDArray[np.intp]:
    """Which steps fit in the heat map, evenly chosen."""
    most = max(1, MOST_CELLS // max(1, len(job.ranks)))
    every = max(1, -(-len(job.steps) // most))
    return np.arange(0, len(job.steps), every)


def _steps_left_out(job: Job, shown: NDArray[np.intp]) -> str:
    if len(shown) == len(job.steps):
        return ""
    every = -(-len(job.steps) // len(shown))
    return f"{len(shown)} of {counted(len(job.steps), 'step')} are shown, one in {every}."


def _no_lanes(job: Job) -> str:
    if not job.clock.aligned:
        return f"Nothing to draw on one clock: {job.clock.detail or NOT_ALIGNED}."
    if job.lanes is None or not len(job.lanes.step_rank) + len(job.lanes.match):
        return "Nothing was recorded by several ranks that could be drawn on one clock."
    return ""


def _lanes_left_out(job: Job) -> str:
    if job.lanes is None or len(job.lanes.ranks) == len(job.ranks):
        return ""
    return (
        f"{len(job.lanes.ranks)} of {counted(len(job.ranks), 'rank')} are drawn: those named "
        "in findings, the "
        "slowest, the fastest and the first. A wait ends when the last rank arrives, drawn or not."
    )


def _payload(job: Job, shown: NDArray[np.intp]) -> str:
    hosts = {host: number for number, host in enumerate(ranks_by_host(job.hosts))}
    head: dict[str, Any] = {
        "ranks": job.ranks,
        "hosts": list(hosts),
        "places": [place_words(job.places.get(host)) for host in hosts],
        "host": [hosts[job.hosts[r]] if r in job.hosts else -1 for r in job.ranks],
        "steps": [job.steps[i] for i in shown.tolist()],
        "metrics": METRICS,
        "stragglers": [
            [rank, CAUSES[straggler.cause]]
            for straggler in job.stragglers.ranks
            for rank in (straggler.ranks if straggler.rank is None else (straggler.rank,))
        ],
        "slowHosts": [
            [hosts[straggler.host], CAUSES[straggler.cause]]
            for straggler in job.stragglers.ranks
            if straggler.scope != "rank" and straggler.host in hosts
        ],
        "tables": job_tables(job),
    }
    columns: dict[str, Column] = {
        name: matrix[shown].T.reshape(-1) + 1  # rank by rank; 0 where a rank lacks the step
        for name, matrix in (
            ("step", job.step_ns),
            ("comm", job.exposed_comm_ns),
            ("input", job.input_ns),
        )
    }
    if not _no_lanes(job) and job.lanes is not None:
        zero = _first_ns(job.lanes, job.path)
        head["lanes"] = _lanes_head(job, job.lanes, zero)
        columns |= _lane_columns(job.lanes, zero)
        if job.path is not None:
            head["path"] = _path_head(job.path, zero)
            columns |= _path_columns(job.path, zero)
    return encode_block(head, columns)


def _first_ns(lanes: Lanes, path: CriticalPath | None) -> int:
    firsts = [int(times.min()) for times in (lanes.arrival_ns, lanes.step_start_ns) if len(times)]
    return min([*firsts, *([path.start_ns] if path else [])])


def _lanes_head(job: Job, lanes: Lanes, zero: int) -> dict[str, Any]:
    lasts = [int(times.max()) for times in (lanes.end_ns, lanes.step_end_ns) if len(times)]
    place = {rank: i for i, rank in enumerate(lanes.ranks)}
    return {
        "ranks": lanes.ranks,
        "errors": [job.clock.error_ns.get(rank, 0) for rank in lanes.ranks],
        "reference": job.clock.reference,
        "kinds": KINDS,
        "waiting": [kind in SYNCHRONISING for kind in KINDS],
        "span": max(lasts) - zero,
        "steps": [
            [place[rank], number, start - zero, end - zero]
            for rank, number, start, end in np.stack(
                [lanes.step_rank, lanes.step_number, lanes.step_start_ns, lanes.step_end_ns], 1
            ).tolist()
        ],
    }


def _lane_columns(lanes: Lanes, zero: int) -> dict[str, Column]:
    match = np.unique(lanes.match, return_inverse=True)[1].reshape(-1)
    # When the last rank, drawn or not, arrived at each collective.
    last = np.zeros(int(match.max(initial=-1)) + 1, np.int64)
    last[match] = lanes.last_ns
    place = np.searchsorted(np.array(lanes.ranks), lanes.rank)
    row = np.zeros(len(lanes.match), np.int64)
    for lane in range(len(lanes.ranks)):
        mine = np.flatnonzero(place == lane)
        row[mine] = overlap_rows(lanes.arrival_ns[mine], lanes.end_ns[mine])
    return {
        "lane_match": match,
        "lane_place": place,
        "lane_row": np.minimum(row, _MOST_ROWS - 1),
        "lane_kind": lanes.kind.astype(np.int64),
        "lane_size": lanes.size_bytes + 1,
        "lane_arrival": lanes.arrival_ns - zero,
        "lane_start": np.maximum(lanes.start_ns - zero, 0),
        "lane_end": lanes.end_ns - zero,
        "last": last - zero,
    }


def _path_head(path: CriticalPath, zero: int) -> dict[str, Any]:
    return {
        "step": path.step,
        "start": path.start_ns - zero,
        "end": path.end_ns - zero,
        "kinds": _PATH_KINDS,
        "labels": _labels(path),
    }


def _labels(path: CriticalPath) -> list[str]:
    return sorted({piece.label for piece in path.pieces})


def _path_columns(path: CriticalPath, zero: int) -> dict[str, Column]:
    labels = {label: number for number, label in enumerate(_labels(path))}
    table = np.array(
        [
            (p.rank, _PATH_KINDS.index(p.kind), labels[p.label], p.start_ns, p.end_ns)
            for p in path.pieces
        ],
        np.int64,
    ).reshape(-1, 5)
    return {
        "path_rank": table[:, 0],
        "path_kind": table[:, 1],
        "path_label": table[:, 2],
        "path_start": table[:, 3] - zero,
        "path_end": table[:, 4] - zero,
    }


PANE = Pane(id="ranks", title="Across ranks", order=40, view=report_view)
