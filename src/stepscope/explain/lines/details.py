"""What a line's time consists of: its operators with their shapes, its kernels, its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.call_tree import group, sum_by
from stepscope.explain.device_time import sum_device_time
from stepscope.explain.lines.marks import MARK, NODE
from stepscope.explain.steps import step_of
from stepscope.explain.work import launches_of, rows_named
from stepscope.records.line_costs import LineKernel, LineOperator
from stepscope.records.trace import ABSENT
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from stepscope.explain.arrays import Bools, Indices
    from stepscope.explain.lines.marks import HostLines
    from stepscope.explain.work import Work
    from stepscope.records.explanation import Steps
    from stepscope.records.trace import Trace

MOST_ROWS = 40  # of one line, the longest


def count_calls(trace: Trace, lines: HostLines, steps: Steps) -> dict[int, float]:
    """How often each line runs in a step, by its code."""
    begins = rows_named(trace, trace.host, lines.is_mark, lambda name: name.startswith(MARK))
    rows = np.flatnonzero(begins & (step_of(steps.steps, trace.host.start_ns) >= 0))
    first, inverse, count = group(trace.host.name[rows])
    times = np.bincount(inverse, minlength=count) / max(1, len(steps.steps))
    return dict(zip(trace.host.name[rows[first]].tolist(), times.tolist(), strict=True))


def list_line_operators(
    trace: Trace, lines: HostLines, work: Work, steps: Steps, scale: float
) -> dict[int, tuple[LineOperator, ...]]:
    """The outermost operators of each line, longest first; `scale` makes milliseconds of a step."""
    host = trace.host
    rows = np.flatnonzero(_outermost(trace, lines) & (step_of(steps.steps, host.start_ns) >= 0))
    rows = rows[lines.line[rows] >= 0]
    took = host.dur_ns if work.on_host else sum_device_time(trace, work).inclusive
    first, inverse, count = group(lines.line[rows], host.name[rows], host.shapes[rows])
    calls = np.bincount(inverse, minlength=count) / max(1, len(steps.steps))
    total = sum_by(inverse, took[rows], count)
    found: dict[int, list[LineOperator]] = {}
    for place in np.argsort(-total, kind="stable").tolist():
        row = rows[first[place]]
        mine = found.setdefault(int(lines.line[row]), [])
        if len(mine) < MOST_ROWS:
            mine.append(
                LineOperator(
                    name=trace.strings[host.name[row]].removeprefix(NODE),
                    calls=float(calls[place]),
                    ms=float(total[place]) * scale,
                    shapes=_text(trace, int(host.shapes[row])),
                )
            )
    return {code: tuple(operators) for code, operators in found.items()}


def list_line_kernels(
    trace: Trace, lines: HostLines, work: Work, steps: Steps, scale: float
) -> dict[int, tuple[LineKernel, ...]]:
    """What each line ran on the accelerator, longest first; nothing on the CPU."""
    if work.on_host:
        return {}
    launch = launches_of(trace, work)
    pieces = np.flatnonzero(launch >= 0)
    pieces = pieces[step_of(steps.steps, trace.host.start_ns[launch[pieces]]) >= 0]
    pieces = pieces[lines.line[launch[pieces]] >= 0]
    names = trace.device.name[work.rows[pieces]]
    first, inverse, count = group(lines.line[launch[pieces]], names)
    total = sum_by(inverse, (work.end_ns - work.start_ns)[pieces], count)
    found: dict[int, list[LineKernel]] = {}
    for place in np.argsort(-total, kind="stable").tolist():
        piece = pieces[first[place]]
        mine = found.setdefault(int(lines.line[launch[piece]]), [])
        if len(mine) < MOST_ROWS:
            name = trace.strings[trace.device.name[work.rows[piece]]]
            mine.append(LineKernel(name=name, ms=float(total[place]) * scale))
    return {code: tuple(kernels) for code, kernels in found.items()}


def _outermost(trace: Trace, lines: HostLines) -> Bools:
    """Operators that no other operator encloses between them and their line's mark."""
    host = trace.host
    rows: Indices = np.flatnonzero(lines.operator)
    around = nearest_of(host, lines.operator, host.parent[rows])
    mark = nearest_of(host, lines.is_mark, rows)
    outer = np.zeros(len(host), np.bool_)
    outer[rows[(around < 0) | (around < mark)]] = True
    return outer


def _text(trace: Trace, code: int) -> str | None:
    return None if code == ABSENT else trace.strings[code]
