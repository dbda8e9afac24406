"""Compiled graphs in the step, opened up to kernels and to lines of the model's source."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from stepscope.explain.compiled.graph_calls import DYNAMO_REGION, find_graph_calls
from stepscope.explain.compiled.graph_kernels import GraphKernels, time_kernels
from stepscope.explain.flops.compiled_regions import (
    CORE_RATES,
    REGION,
    graph_rates,
    price_graph,
    price_operator,
)
from stepscope.explain.flops.cost import MATMUL_LIKE
from stepscope.explain.flops.memory_bound import VIEWS
from stepscope.records.compiled import RegionLine, RegionTime, UnfusedPair
from stepscope.trace.kernel_nodes import GRAPH_VIEWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.records.compiled import CompiledGraph, GraphKernel, GraphOperator
    from stepscope.records.efficiency import Ceilings
    from stepscope.records.place import Place
    from stepscope.records.trace import Trace

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
        totals = _Totals(
            calls=len(same),
            busy_ns=int(calls.busy_ns[same].sum()),
            waiting_ns=int(waiting[same].sum()),
            backward=bool(calls.backward[same].any()),
            region=_region_name(trace, calls.region[same].max()),
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


def _region_name(trace: Trace, row: int) -> str | None:
    found = DYNAMO_REGION.match(trace.strings[int(trace.host.name[row])]) if row >= 0 else None
    return found[1] if found else None


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
            operators=tuple(dict.fromkeys(one.name for one in _longest(same)))[:_MOST_OPERATORS],
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


def _longest(same: list[GraphOperator]) -> list[GraphOperator]:
    return sorted(same, key=lambda one: (one.name not in MATMUL_LIKE, -(one.size_bytes or 0)))
