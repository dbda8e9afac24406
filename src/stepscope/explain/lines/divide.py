"""The steps' time, divided among lines so that nothing is counted twice and nothing is lost.

On the CPU, every moment of the training thread belongs to the innermost line that runs. On an
accelerator, every moment of the device belongs to the line of the kernel that runs, and a gap to
the line of the kernel that ends it: that line's launch was late.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.call_tree import children_sum
from stepscope.explain.lines.marks import LinePhase
from stepscope.explain.steps import step_of
from stepscope.explain.work import launches_of
from stepscope.records.trace import ABSENT
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.arrays import Int32s, Int64s
    from stepscope.explain.lines.marks import HostLines
    from stepscope.explain.work import Work
    from stepscope.records.explanation import Steps
    from stepscope.records.trace import Trace


class DividedTime(msgspec.Struct, frozen=True, kw_only=True):
    """Pieces of time with the line (-1: none) and phase of each; they add up to `total_ns`."""

    line: Int32s
    phase: NDArray[np.int8]
    dur_ns: Int64s
    total_ns: int
    steps: int  # how many were divided


def divide_time(trace: Trace, lines: HostLines, work: Work, steps: Steps) -> DividedTime:
    """All marked steps of the trace."""
    if work.on_host:
        return _divide_host(trace, lines, steps)
    return _divide_device(trace, lines, work, steps)


def _divide_host(trace: Trace, lines: HostLines, steps: Steps) -> DividedTime:
    """Each row's own time: its duration without that of the rows inside it."""
    host = trace.host
    here = host.thread == host.thread[np.flatnonzero(lines.is_mark)[0]]
    inside = here & (step_of(steps.steps, host.start_ns) >= 0)
    own = host.dur_ns - children_sum(host.parent, host.dur_ns)
    rows = np.flatnonzero(inside)
    total = sum(step.dur_ns for step in steps.steps)
    rest = total - int(own[rows].sum())  # between rows that overlap a step's edge
    return DividedTime(
        line=np.append(lines.line[rows], ABSENT).astype(np.int32),
        phase=np.append(lines.phase[rows], LinePhase.OTHER).astype(np.int8),
        dur_ns=np.append(own[rows], rest),
        total_ns=total,
        steps=len(steps.steps),
    )


def _divide_device(trace: Trace, lines: HostLines, work: Work, steps: Steps) -> DividedTime:
    """From the first work that the marked steps launched to the end of their last."""
    launch = launches_of(trace, work)
    linked = np.flatnonzero(launch >= 0)
    number = step_of(steps.steps, trace.host.start_ns[launch[linked]])
    linked, number = linked[number >= 0], number[number >= 0]
    order = linked[np.argsort(work.start_ns[linked], kind="stable")]
    if not len(order):
        nothing = np.empty(0, np.int64)
        return DividedTime(
            line=nothing.astype(np.int32),
            phase=nothing.astype(np.int8),
            dur_ns=nothing,
            total_ns=0,
            steps=0,
        )
    ends = np.maximum.accumulate(work.end_ns[order])
    before = np.append(work.start_ns[order[0]], ends[:-1])
    rows = launch[order]
    # From the end of all earlier work to its own end: the gap before it, and what it adds.
    return DividedTime(
        line=lines.line[rows],
        phase=lines.phase[rows],
        dur_ns=ends - before,
        total_ns=int(ends[-1] - before[0]),
        steps=len(distinct(number)),
    )
