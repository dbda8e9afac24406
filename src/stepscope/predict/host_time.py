"""Host time inside some events, taken out of the gaps it lies in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain import intervals
from stepscope.explain.steps import step_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.replay.graph import StepGraph
    from stepscope.predict.step_context import StepContext


def shorten_gaps(
    context: StepContext, rows: NDArray[np.intp], factor: float = 0.0
) -> tuple[StepGraph, float]:
    """The gaps of the step with what these host events fill of them multiplied by a factor.

    Events are looked for in the step that the graph was taken from (its calls' rows); returns what
    was saved, in nanoseconds of the step without the profiler.
    """
    graph, host = context.graph, context.trace.host
    calls = graph.calls
    known = np.flatnonzero(calls.row >= 0)
    if not len(known) or not len(rows):
        return graph, 0.0
    start = host.start_ns[calls.row[known]]
    end = start + host.dur_ns[calls.row[known]]
    steps = context.steps.steps
    of = step_of(steps, start[-1:]) if steps else np.array([-1])
    begin = steps[int(of[0])].start_ns if steps and of[0] >= 0 else int(start[0])
    before = np.append(begin, end[:-1])
    begun = host.start_ns[rows]
    covered = intervals.union(begun, begun + host.dur_ns[rows])
    inside = intervals.length_before(covered, start) - intervals.length_before(covered, before)
    profiled = np.maximum(start - before, 1)
    share = np.clip(inside / profiled, 0.0, 1.0)
    keep = np.ones(len(calls))
    keep[known] = 1.0 - share * (1.0 - factor)
    gaps = calls.gap_ns * keep
    saved = float((calls.gap_ns - gaps).sum())
    return replace(graph, calls=replace(calls, gap_ns=gaps)), saved
