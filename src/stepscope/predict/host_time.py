"""Host time inside some events, taken out of the gaps it lies in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain import intervals
from stepscope.explain.work import rows_named
from stepscope.predict.buckets import step_window

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.explain.arrays import Int64s
    from stepscope.explain.replay.graph import StepGraph
    from stepscope.predict.step_context import StepContext
    from stepscope.records.trace import HostKind


def shorten_gaps(
    context: StepContext, last: HostKind, matches: Callable[[str], object], factor: float = 0.0
) -> tuple[StepGraph, float, int]:
    """Multiply by `factor` the part of the step's gaps that host events of matching names fill.

    They are of kinds up to `last`; only those in the step that the graph was taken from count. Also
    returns the time saved, in nanoseconds of the step without the profiler, and how many there are.
    """
    host = context.trace.host
    rows = np.flatnonzero(rows_named(context.trace, host, host.kind <= last, matches))
    starts = host.start_ns[rows]
    graph, saved_ns = shorten_spans(context, starts, starts + host.dur_ns[rows], factor)
    return graph, saved_ns, len(rows)


def shorten_spans(
    context: StepContext, starts: Int64s, ends: Int64s, factor: float = 0.0
) -> tuple[StepGraph, float]:
    """Multiply by `factor` the part of the step's gaps that these spans of host time fill."""
    graph, host = context.graph, context.trace.host
    calls = graph.calls
    known = np.flatnonzero(calls.row >= 0)
    if not len(known) or not len(starts):
        return graph, 0.0
    start = host.start_ns[calls.row[known]]
    end = start + host.dur_ns[calls.row[known]]
    gap_start = np.append(step_window(context)[0], end[:-1])
    spans = intervals.union(starts, ends)
    filled = intervals.length_before(spans, start) - intervals.length_before(spans, gap_start)
    share = np.clip(filled / np.maximum(start - gap_start, 1), 0.0, 1.0)
    left = np.ones(len(calls))
    left[known] = 1.0 - share * (1.0 - factor)
    gap_ns = calls.gap_ns * left
    saved_ns = float((calls.gap_ns - gap_ns).sum())
    return replace(graph, calls=replace(calls, gap_ns=gap_ns)), saved_ns
