"""The steps of a trace, and the steady cycle that the budget is taken over."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.repeated_steps import (
    BACKWARD_NODE,
    OPTIMIZER_STEP,
    find_repeats,
    only_step,
    several_a_step,
)
from stepscope.explain.work import launches_of, rows_named
from stepscope.records.explanation import Step, Steps
from stepscope.records.trace import HostKind

if TYPE_CHECKING:
    from stepscope.explain.arrays import Int64s
    from stepscope.explain.work import Work
    from stepscope.records.explanation import StepsSource
    from stepscope.records.trace import Trace

_PROFILER_STEP = re.compile(r"^ProfilerStep")


def find_steps(trace: Trace, work: Work) -> Steps:
    """From the profiler's marks; else from optimizer steps; else from what repeats. Without any of
    them there are no steps: the window is a span of time."""
    steps = _marked(trace, _PROFILER_STEP)
    if steps:
        return _with_cycles("profiler", steps, trace, work)
    ends = [step.start_ns + step.dur_ns for step in _marked(trace, OPTIMIZER_STEP)]
    if len(ends) >= 2:
        ends = ends[:: several_a_step(trace, work, ends)]
        steps = tuple(
            Step(name=f"between optimizer steps {i} and {i + 1}", start_ns=a, dur_ns=b - a)
            for i, (a, b) in enumerate(pairwise(ends))
        )
        return _with_cycles("optimizer", steps, trace, work)
    if ends and (only := only_step(trace, ends[0])) is not None:
        return _with_cycles("optimizer", (only,), trace, work)
    repeats = find_repeats(trace, work)
    if repeats is not None:
        found = _with_cycles("repeated", repeats.steps, trace, work)
        return replace(found, repeats=repeats.what)
    start, end = work.extent
    return Steps(source="window", steps=(), cycles_ns=(), window_start_ns=start, window_end_ns=end)


def _marked(trace: Trace, pattern: re.Pattern[str]) -> tuple[Step, ...]:
    host = trace.host
    rows = np.flatnonzero(rows_named(trace, host, host.kind != HostKind.PYTHON, pattern.match))
    rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
    return tuple(
        Step(
            name=trace.strings[host.name[row]],
            start_ns=int(host.start_ns[row]),
            dur_ns=int(host.dur_ns[row]),
        )
        for row in rows.tolist()
    )


def step_of(steps: tuple[Step, ...], times: Int64s) -> Int64s:
    """Index of the step that each host time falls into, or -1."""
    starts = np.array([step.start_ns for step in steps], np.int64)
    ends = np.array([step.start_ns + step.dur_ns for step in steps], np.int64)
    place = np.searchsorted(starts, times, side="right") - 1
    inside = (place >= 0) & (times < ends[np.maximum(place, 0)])
    return np.where(inside, place, -1)


def _with_cycles(source: StepsSource, steps: tuple[Step, ...], trace: Trace, work: Work) -> Steps:
    first, edges = _cycle_edges(steps, trace, work)
    if source != "profiler" and len(edges) and not work.on_host:
        edges = _close(edges, steps[-1], trace, work)
    start, end = (int(edges[0]), int(edges[-1])) if len(edges) >= 2 else work.extent
    return Steps(
        source=source,
        steps=steps,
        cycles_ns=tuple(np.diff(edges).tolist()),
        first_cycle=first,
        window_start_ns=start,
        window_end_ns=end,
    )


def _lacks_in_last(steps: tuple[Step, ...], updates: tuple[Step, ...]) -> bool:
    """Whether the last step holds fewer of these than every other."""
    which = step_of(steps, np.array([one.start_ns for one in updates], np.int64))
    held = np.bincount(which[which >= 0], minlength=len(steps))
    return len(steps) > 1 and bool(held[-1] < held[:-1].min())


def _cycle_edges(steps: tuple[Step, ...], trace: Trace, work: Work) -> tuple[int, Int64s]:
    """The start of each step's first work; on the CPU, the steps' starts and the last end.

    A last step that launched nothing, because the window closed, is left out; on the CPU, one
    with fewer optimizer steps than all others: the training ended there. The optimizer's step may
    be compiled, and leave no mark: then the backward pass counts.
    """
    none = np.empty(0, np.int64)
    if work.on_host:
        last = steps[-1]
        edges = np.array([s.start_ns for s in steps] + [last.start_ns + last.dur_ns], np.int64)
        updates = _marked(trace, OPTIMIZER_STEP) or _marked(trace, BACKWARD_NODE)
        if _lacks_in_last(steps, updates):
            edges = edges[:-1]
        return 0, edges if (np.diff(edges) > 0).all() else none
    launch = launches_of(trace, work)
    linked = np.flatnonzero(launch >= 0)
    which = step_of(steps, trace.host.start_ns[launch[linked]])
    never = np.iinfo(np.int64).max
    first = np.full(len(steps), never, np.int64)
    inside = which >= 0
    np.minimum.at(first, which[inside], work.start_ns[linked[inside]])
    working = np.flatnonzero(first < never)
    edges = first[working]
    unbroken = len(working) >= 2 and working[-1] - working[0] == len(working) - 1
    if len(working) == 1 == len(steps):
        return 0, edges
    if not unbroken or (np.diff(edges) <= 0).any():
        return 0, none
    return int(working[0]), edges


def _close(edges: Int64s, last: Step, trace: Trace, work: Work) -> Int64s:
    """End the last step where the next one's work begins, although nothing marks that one. A single
    step without a next one ends with its own work, so that start-up is no part of it."""
    launch = launches_of(trace, work)
    linked = np.flatnonzero(launch >= 0)
    launched_ns = trace.host.start_ns[launch[linked]]
    end_ns = last.start_ns + last.dur_ns
    later = work.start_ns[linked[launched_ns >= end_ns]]
    end = int(later.min()) if len(later) else 0
    if len(edges) == 1 and not end:
        mine = (launched_ns >= last.start_ns) & (launched_ns < end_ns)
        end = int(work.end_ns[linked[mine]].max())
    return np.append(edges, np.int64(end)) if end > edges[-1] else edges
