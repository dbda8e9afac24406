"""What each graph break costs a step: the time from one graph to the next, forward and backward.

Without the break the two graphs are one, and all between them disappears: leaving the first, the
line that could not be traced, guards, and entering the second. The profiler's own cost is left out.
On an accelerator, only the time that the device does not compute for a graph counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.call_tree import group
from stepscope.explain.compiled.graph_calls import (
    DYNAMO_REGION,
    find_all_graph_calls,
    find_graph_calls,
)
from stepscope.explain.replay.cpu_overhead import event_cost_ns
from stepscope.explain.work import rows_named
from stepscope.records.compiled import BreakCost
from stepscope.records.trace import HostKind
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepscope.explain.arrays import Floats, Int64s
    from stepscope.explain.compiled.graph_calls import GraphCalls
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.records.compiled import GraphBreak
    from stepscope.records.trace import Trace

_NOT_RECORDED = "not recorded: compiled before the capture began"
_ACCUMULATES = "torch::autograd::AccumulateGrad"
_LEAST = 0.2  # of a gap remains, however much the profiler costs


def price_breaks(analysis: RankAnalysis, breaks: Iterable[GraphBreak]) -> tuple[BreakCost, ...]:
    """The costliest first; breaks that the trace does not show come last."""
    calls = analysis.compute_once(find_graph_calls)
    by_region = _sum_by_region(analysis, calls)
    steps = analysis.steady_steps.count
    costs = []
    known: set[str] = set()
    for one in breaks:
        shown = [by_region[region] for region in one.regions if region in by_region]
        known.update(one.regions)
        costs.append(
            BreakCost(
                reason=one.reason,
                hint=one.hint,
                place=one.place,
                times=sum(times for times, _ in shown) / steps if shown else None,
                cost_ms=sum(ns for _, ns in shown) / steps / 1e6 if shown else None,
            )
        )
    for region in by_region.keys() - known:
        times, ns = by_region[region]
        costs.append(
            BreakCost(
                reason=_NOT_RECORDED, place=None, times=times / steps, cost_ms=ns / steps / 1e6
            )
        )
    return merge_places(costs)


def merge_places(costs: Iterable[BreakCost]) -> tuple[BreakCost, ...]:
    """A call that cannot be inlined ends its caller's graph too: one line, one break."""
    merged: dict[tuple[object, str], BreakCost] = {}
    for cost in costs:
        key = (cost.place, cost.reason)
        before = merged.get(key)
        merged[key] = cost if before is None else _added(before, cost)
    return tuple(sorted(merged.values(), key=lambda cost: -(cost.cost_ms or 0.0)))


def _added(a: BreakCost, b: BreakCost) -> BreakCost:
    if a.cost_ms is None or b.cost_ms is None:
        return a if b.cost_ms is None else b
    return BreakCost(
        reason=a.reason,
        hint=a.hint,
        place=a.place,
        times=max(a.times or 0.0, b.times or 0.0),
        cost_ms=a.cost_ms + b.cost_ms,
    )


def find_break_spans(analysis: RankAnalysis) -> tuple[Int64s, Int64s]:
    """The host's time from each graph to the next one that a break splits off, both passes, in the
    whole trace: starts and ends."""
    calls = analysis.compute_once(find_all_graph_calls)
    before, after, _ = _broken_pairs(analysis.trace, calls)
    first, then, _ = _backward_pairs(calls, before, after)
    starts = np.concatenate((calls.end_ns[before], calls.end_ns[first]))
    ends = np.concatenate((calls.start_ns[after], calls.start_ns[then]))
    return starts, ends


def _broken_pairs(trace: Trace, calls: GraphCalls) -> tuple[Int64s, Int64s, Int64s]:
    """Calls with the next call in the same region, and the region's row."""
    forward = np.flatnonzero(calls.region >= 0)
    before, after = forward[:-1], forward[1:]
    region = _common_region(trace, calls, before, after)
    host = trace.host
    broken = (region >= 0) & (host.thread[calls.rows[before]] == host.thread[calls.rows[after]])
    return before[broken], after[broken], region[broken]


def _sum_by_region(analysis: RankAnalysis, calls: GraphCalls) -> dict[str, tuple[int, float]]:
    """How often graphs of a region were followed by another one inside it, and the time between.

    Between the same two graphs the median counts: a gap in which the host lost its core, or the
    profiler wrote out its events, says nothing about the break.
    """
    trace = analysis.trace
    before, after, region = _broken_pairs(trace, calls)
    if not len(before):
        return {}
    host = trace.host
    between = _between(analysis, calls, before, after)
    between += _backward_gaps(analysis, calls, before, after)
    names = (host.name[region], host.name[calls.rows[before]], host.name[calls.rows[after]])
    first, which, count = group(*names)
    sums: dict[str, tuple[int, float]] = {}
    for number, place in zip(range(count), first.tolist(), strict=True):
        match = DYNAMO_REGION.match(trace.strings[host.name[region[place]]])
        name = match[1] if match else ""
        gaps = between[which == number]
        times, ns = sums.get(name, (0, 0.0))
        sums[name] = (times + len(gaps), ns + len(gaps) * float(np.median(gaps)))
    return sums


def _common_region(trace: Trace, calls: GraphCalls, before: Int64s, after: Int64s) -> Int64s:
    """The innermost region that holds both calls. What follows a break runs inside its region."""
    host = trace.host
    is_region = rows_named(
        trace, host, np.ones(len(host), np.bool_), lambda name: DYNAMO_REGION.match(name)
    )
    region = calls.region[before].astype(np.int64)
    starts = calls.start_ns[after]
    while True:
        ends = host.start_ns[region] + host.dur_ns[region]
        out = np.flatnonzero((region >= 0) & (ends <= starts))
        if not len(out):
            return region
        region[out] = nearest_of(host, is_region, host.parent[region[out]])


def _between(analysis: RankAnalysis, calls: GraphCalls, before: Int64s, after: Int64s) -> Floats:
    """Nanoseconds from each call to the next one, without the profiler's."""
    if not analysis.work.on_host:
        known = (calls.last_ns[before] >= 0) & (calls.first_ns[after] >= 0)
        gap = np.where(known, calls.first_ns[after] - calls.last_ns[before], 0)
        idle: Floats = np.maximum(gap, 0).astype(np.float64)
        return idle
    start, end = calls.end_ns[before], calls.start_ns[after]
    gap = np.maximum(end - start, 0).astype(np.float64)
    host = analysis.trace.host
    recorded = np.sort(host.start_ns[host.kind <= HostKind.ANNOTATION])
    events = np.searchsorted(recorded, end) - np.searchsorted(recorded, start)
    cost = events * event_cost_ns(analysis.trace, analysis.slowness)
    without: Floats = np.maximum(gap - cost, _LEAST * gap)
    return without


def _backward_pairs(
    calls: GraphCalls, before: Int64s, after: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """The backward graphs of these calls in their own order, and the places of the pairs that have
    them."""
    of_forward = np.full(len(calls), -1, np.int64)
    backward = np.flatnonzero(calls.forward >= 0)
    of_forward[calls.forward[backward]] = backward
    first, then = of_forward[after], of_forward[before]  # backward runs in the opposite order
    known = np.flatnonzero((first >= 0) & (then >= 0))
    known = known[calls.start_ns[then[known]] >= calls.end_ns[first[known]]]
    return first[known], then[known], known


def _backward_gaps(
    analysis: RankAnalysis, calls: GraphCalls, before: Int64s, after: Int64s
) -> Floats:
    """The same between the backward graphs of these calls; gradients are summed in any case."""
    first, then, known = _backward_pairs(calls, before, after)
    gaps = np.zeros(len(before), np.float64)
    if not len(known):
        return gaps
    gaps[known] = _between(analysis, calls, first, then)
    if analysis.work.on_host:
        summing = _summing_ns(analysis.trace, calls.end_ns[first], calls.start_ns[then])
        gaps[known] = np.maximum(gaps[known] - summing, 0)
    return gaps


def _summing_ns(trace: Trace, start: Int64s, end: Int64s) -> Int64s:
    """Time in gradient accumulation that begins in each of these spans."""
    host = trace.host
    operator = host.kind == HostKind.OPERATOR
    name = f"autograd::engine::evaluate_function: {_ACCUMULATES}"
    rows = np.flatnonzero(rows_named(trace, host, operator, name.__eq__))
    rows = rows[np.argsort(host.start_ns[rows])]
    total = np.concatenate(([0], np.cumsum(host.dur_ns[rows])))
    places = (np.searchsorted(host.start_ns[rows], time) for time in (end, start))
    last, first = (total[place] for place in places)
    summing: Int64s = last - first
    return summing
