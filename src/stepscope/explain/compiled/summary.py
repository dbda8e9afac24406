"""All that is known about torch.compile in one rank: its regions down to source lines, its
compilations, and what each graph break costs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from stepscope.explain.compiled.graph_calls import (
    DYNAMO_REGION,
    GraphCalls,
    find_all_graph_calls,
    find_graph_calls,
)
from stepscope.explain.compiled.graph_kernels import GraphKernels, share_known, time_kernels
from stepscope.explain.flops.call import MATMUL_LIKE, REGION
from stepscope.explain.flops.memory_bound import VIEWS
from stepscope.explain.flops.prices import CORE_RATES, graph_rates, price_graph, price_operator
from stepscope.records.compiled import (
    GRAPH_VIEWS,
    BreakCost,
    Compilation,
    CompiledGraph,
    CompiledWork,
    CompilerRecord,
    FailedGuard,
    GraphBreak,
    GraphKernel,
    GraphOperator,
    Recompiled,
    RegionLine,
    RegionTime,
    RunsEager,
    UnfusedPair,
)
from stepscope.records.hardware import Ceilings
from stepscope.records.normal import median
from stepscope.records.source_lines import Place
from stepscope.records.trace import HostKind, Trace
from stepscope.step.arrays import Floats, Int64s
from stepscope.step.call_tree import group
from stepscope.step.correct import event_cost_ns
from stepscope.step.work import rows_named
from stepscope.text.words import lazy_pattern
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from stepscope.explain.rank_analysis import RankAnalysis

_BARE = "the compiler's own records were not captured: record with `stepscope run`"


def explain_compiled(analysis: RankAnalysis) -> CompiledWork | None:
    """None for a rank that compiled nothing and ran nothing compiled."""
    record = analysis.inputs.compiler or CompilerRecord()
    regions = time_regions(analysis, record.graphs)
    breaks = price_breaks(analysis, record.breaks)
    if not regions and not breaks and not record.compilations:
        return None
    total, cold, cached = compile_seconds(record.compilations)
    with_operator, with_line = share_known(analysis)
    return CompiledWork(
        compilations=count_compiled(record.compilations) if analysis.inputs.compiler else None,
        compile_s=total,
        cold_s=cold,
        cached_s=cached,
        operator_share=with_operator,
        line_share=with_line,
        regions=regions,
        breaks=breaks,
        recompiled=list_recompiled(record.compilations),
        eager=list_eager(record.compilations),
        notes=tuple(_notes(record, regions)),
    )


def _notes(record: CompilerRecord, regions: tuple[RegionTime, ...]) -> Iterator[str]:
    if not record.compilations and not record.graphs:
        yield _BARE
    elif regions and not any(region.captured for region in regions):
        yield (
            "graphs were not captured: this version of torch keeps no text of them, or they were "
            "compiled before the capture began"
        )
    if any(
        graph.operators and not any(one.place for one in graph.operators) for graph in record.graphs
    ):
        yield (
            "torch keeps no source lines of what compiled autograd compiles, nor of a container "
            "such as nn.Sequential that is compiled itself"
        )


# Compiled graphs in the step, opened up to kernels and to lines of the model's source.

MOST_LINES = 24
_MOST_PAIRS = 8
_MOST_OPERATORS = 6


def time_regions(analysis: RankAnalysis, graphs: Iterable[CompiledGraph]) -> tuple[RegionTime, ...]:
    """Graphs that ran in the steady steps, most time first."""
    trace = analysis.trace
    calls = analysis.compute_once(find_graph_calls)
    by_key = {graph.key: graph for graph in graphs}
    codes, which = np.unique(trace.host.name[calls.rows], return_inverse=True)
    waiting = np.maximum(calls.last_ns - calls.first_ns - calls.busy_ns, 0)
    kernels = analysis.compute_once(time_kernels)
    timed = []
    for number, code in enumerate(codes.tolist()):
        same = np.flatnonzero(which == number)
        match = REGION.match(trace.strings[code])
        key = match[1] if match else trace.strings[code]
        row = calls.region[same].max()
        found = DYNAMO_REGION.match(trace.strings[int(trace.host.name[row])]) if row >= 0 else None
        totals = _Totals(
            calls=len(same),
            busy_ns=int(calls.busy_ns[same].sum()),
            waiting_ns=int(waiting[same].sum()),
            backward=bool(calls.backward[same].any()),
            region=found[1] if found else None,
        )
        timed.append(_region(key, by_key.get(key), totals, analysis, kernels.get(key)))
    return tuple(sorted(timed, key=lambda region: -region.ms))


class _Totals(NamedTuple):
    """All calls of one graph in the steady steps."""

    calls: int
    busy_ns: int
    waiting_ns: int
    backward: bool
    region: str | None


def _region(
    key: str,
    graph: CompiledGraph | None,
    totals: _Totals,
    analysis: RankAnalysis,
    opened: GraphKernels | None,
) -> RegionTime:
    steps, on_device = analysis.steady_steps.count, not analysis.work.on_host
    operators = graph.operators if graph else ()
    cost = price_graph(graph) if graph else None
    lines = list_graph_lines(operators, graph_rates(cost, analysis.ceilings))
    return RegionTime(
        key=key,
        region=totals.region or (graph.region if graph else None),
        backward=graph.backward if graph else totals.backward,
        calls=totals.calls / steps,
        ms=totals.busy_ns / steps / 1e6,
        flops=cost.flops if cost else None,
        kernels=len(graph.kernels) if graph else 0,
        gaps_ms=totals.waiting_ns / steps / 1e6 if on_device else None,
        captured=bool(operators),
        not_graphed=graph.not_graphed if graph else None,
        unfused=_unfused(graph.kernels if graph else (), totals.calls / steps, analysis.ceilings),
        kernel_times=opened.times if opened else (),
        lines=_measured(lines, opened) if opened and opened.line_shares else lines[:MOST_LINES],
    )


def _measured(lines: Iterable[RegionLine], opened: GraphKernels) -> tuple[RegionLine, ...]:
    """By the time of the kernels instead of what their work should take."""
    shares = {line.place: opened.line_shares.get(line.place, 0.0) for line in lines}
    ordered = sorted(lines, key=lambda line: -shares[line.place])
    return tuple(replace(line, share=shares[line.place]) for line in ordered[:MOST_LINES])


def _unfused(
    kernels: Sequence[GraphKernel], calls: float, ceilings: Ceilings | None
) -> tuple[UnfusedPair, ...]:
    """Neighbours that share the most bytes."""
    bytes_s = ceilings.bytes_s if ceilings else None
    pairs = [
        UnfusedPair(
            first=before.name,
            second=after.name,
            size_bytes=after.shared_bytes,
            ms=1e3 * calls * after.shared_bytes / bytes_s if bytes_s else None,
        )
        for before, after in pairwise(kernels)
        if after.shared_bytes
    ]
    return tuple(sorted(pairs, key=lambda pair: -pair.size_bytes)[:_MOST_PAIRS])


def list_graph_lines(
    operators: Iterable[GraphOperator], rates: tuple[float, float] = CORE_RATES
) -> tuple[RegionLine, ...]:
    """Operators by source line, the longest first: each as long as its FLOPs or its bytes take.

    Fused operators move less than they would alone. So a line of elementwise operators counts its
    inputs and outputs once: what another operator of the line makes is not read again.
    """
    by_place: dict[Place, list[GraphOperator]] = defaultdict(list)
    for operator in operators:
        if operator.place is not None and operator.name not in VIEWS | GRAPH_VIEWS:
            by_place[operator.place].append(operator)
    flops_s, bytes_s = rates
    rows = [(place, same, *_amounts(same)) for place, same in by_place.items()]
    times = [max((flops or 0) / flops_s, moved / bytes_s) for _, _, flops, moved in rows]
    whole = sum(times)
    lines = [
        RegionLine(
            place=place,
            operators=tuple(
                dict.fromkeys(
                    one.name
                    for one in sorted(
                        same, key=lambda one: (one.name not in MATMUL_LIKE, -(one.size_bytes or 0))
                    )
                )
            )[:_MOST_OPERATORS],
            flops=flops,
            bytes_moved=moved,
            share=seconds / whole if whole else None,
        )
        for (place, same, flops, moved), seconds in zip(rows, times, strict=True)
    ]
    return tuple(sorted(lines, key=lambda line: -(line.share or 0.0)))


def _amounts(same: Iterable[GraphOperator]) -> tuple[int | None, int]:
    """FLOPs of products, and bytes in and out of the line."""
    operators = list(same)
    made = {one.node: one.size_bytes or 0 for one in operators}
    read = {name for one in operators for name in one.inputs}
    flops = [price_operator(one).flops for one in operators if one.name in MATMUL_LIKE]
    moved = sum(size for node, size in made.items() if node not in read)
    moved += sum(_read_from_outside(one, made) for one in operators)
    return (None if any(one < 0 for one in flops) else sum(flops)), moved


def _read_from_outside(operator: GraphOperator, made: dict[str, int]) -> int:
    """Bytes of the inputs that other lines made: what a call moves, less what it writes."""
    if any(name in made for name in operator.inputs):
        return 0
    moved = price_operator(operator).moved
    return max(0, moved - (operator.size_bytes or 0))


# What dynamo compiled: how long it took, what it compiled again and why, and what it left.

_LIMIT = ("recompile limit", "recompile_limit", "cache_size_limit", "CacheSizeLimit")
_MOST_GUARDS = 4
_NUMBER = lazy_pattern(r" == |\. expected ")


def list_recompiled(compilations: Sequence[Compilation]) -> tuple[Recompiled, ...]:
    """Functions that were compiled more than once, the longest compiled first."""
    by_function: dict[str, list[Compilation]] = {}
    for one in compilations:
        # `3/1` is the second compilation of function 3.
        by_function.setdefault(
            (one.region or "").rpartition("/")[0] or f"{one.function} {one.place}", []
        ).append(one)
    found = [_recompiled(same) for same in by_function.values() if any(one.again for one in same)]
    return tuple(sorted(found, key=lambda one: -one.seconds))


def _recompiled(same: Sequence[Compilation]) -> Recompiled:
    again = [one for one in same if one.again]
    named = next((one for one in same if one.function), same[0])
    places = {_shared(one.guard): one.guard_place for one in reversed(again) if one.guard_place}
    guards = Counter(
        (guard, one.guard_place or places.get(guard))
        for one in again
        if (guard := _shared(one.guard))
    )
    return Recompiled(
        function=named.function or "not known",
        place=named.place,
        times=count_compiled([one for one in again if not one.failed]),
        seconds=sum(one.seconds or 0.0 for one in again),
        guards=tuple(
            FailedGuard(guard=guard, place=place, times=times)
            for (guard, place), times in guards.most_common(_MOST_GUARDS)
        ),
        gave_up=any(_is_limit(one) for one in again),
    )


def _shared(guard: str | None) -> str:
    """Guards on one value that differ in the number: `len(log) == 7` and `len(log) == 8`."""
    return _NUMBER.split(guard or "", maxsplit=1)[0]


def count_compiled(compilations: Iterable[Compilation]) -> int:
    """A function's backward has a record of its own when it is compiled later."""
    names = [one.region for one in compilations]
    return len({name for name in names if name}) + names.count(None)


def list_eager(compilations: Iterable[Compilation]) -> tuple[RunsEager, ...]:
    """Functions that torch gave up on, for another reason than too many compilations."""
    found: dict[tuple[str, Place | None], RunsEager] = {}
    for one in compilations:
        if one.failed and not _is_limit(one):
            function = one.function or "not known"
            eager = RunsEager(function=function, place=one.place, reason=one.failed)
            found.setdefault((function, one.place), eager)
    return tuple(found.values())


def _is_limit(one: Compilation) -> bool:
    return one.failed is not None and any(word in one.failed for word in _LIMIT)


def compile_seconds(
    compilations: Sequence[Compilation],
) -> tuple[float | None, float | None, float | None]:
    """All of them, those that no cache had, and those that came from a cache. None: not known."""
    known = [one for one in compilations if one.seconds is not None]
    if not known:
        return None, None, None
    total = sum(one.seconds or 0.0 for one in known)
    cached = sum(one.seconds or 0.0 for one in known if one.cached)
    if all(one.cached is None for one in known):
        return total, None, None
    return total, total - cached, cached


# What each graph break costs a step: the time from one graph to the next, forward and backward.
#
# Without the break the two graphs are one, and all between them disappears: leaving the first, the
# line that could not be traced, guards, and entering the second. The profiler's own cost is left
# out. On an accelerator, only the time that the device does not compute for a graph counts.

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
        sums[name] = (times + len(gaps), ns + len(gaps) * median(gaps))
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
