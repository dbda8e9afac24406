"""The time of compiled graphs, divided among the calls in their code.

On an accelerator each kernel belongs to the call that launched it. A CPU's trace shows only what
Inductor left to a library; its own loops ran between these operators, in the order of the code.
Several loops between two operators share the time there by the bytes that they touch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from stepscope.explain.compiled.align_calls import align_kernels, align_operators
from stepscope.explain.flops.compiled_regions import REGION
from stepscope.explain.work import rows_named
from stepscope.records.trace import ABSENT, DeviceKind, HostKind
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from stepscope.explain.arrays import Bools, Indices, Int32s, Int64s
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.records.compiled import CompiledGraph, GraphKernel
    from stepscope.records.trace import Trace

_LEAST_BYTES = 4096  # a call takes some time however little it touches


class KernelPieces(msgspec.Struct, frozen=True, kw_only=True):
    """One row per call of a kernel in a graph's run, in the whole trace."""

    graphs: tuple[CompiledGraph, ...]
    region: Int32s  # host row of the graph's run
    graph: Int32s  # into `graphs`
    kernel: Int32s  # into the graph's kernels; -1: not known
    event: Int32s  # device row; on a CPU, the operator's host row, or -1 for a loop
    dur_ns: Int64s

    def __len__(self) -> int:
        return len(self.dur_ns)


class _GraphRuns(NamedTuple):
    """Runs of recorded graphs in the trace, and the operators right inside them."""

    rows: Indices
    graph: list[int]
    children: Indices  # in the order of time
    edges: Indices  # where the children of each run begin


def divide_regions(analysis: RankAnalysis) -> KernelPieces:
    """Nothing for graphs whose code was not captured."""
    record = analysis.inputs.compiler
    graphs = tuple(one for one in record.graphs if one.kernels) if record else ()
    runs = _find_runs(analysis.trace, graphs)
    pieces = list(
        _on_host(analysis.trace, graphs, runs)
        if analysis.work.on_host
        else _on_device(analysis.trace, graphs, runs)
    )
    return KernelPieces(
        graphs=graphs,
        **{
            name: np.concatenate([getattr(one, name) for one in pieces])
            if pieces
            else np.empty(0, kind)
            for name, kind in _COLUMNS.items()
        },
    )


_COLUMNS: dict[str, type[np.integer]] = {
    "region": np.int32,
    "graph": np.int32,
    "kernel": np.int32,
    "event": np.int32,
    "dur_ns": np.int64,
}


class _PieceColumns(NamedTuple):
    region: Int32s
    graph: Int32s
    kernel: Int32s
    event: Int32s
    dur_ns: Int64s


def _find_runs(trace: Trace, graphs: Sequence[CompiledGraph]) -> _GraphRuns:
    host = trace.host
    number = {graph.key: place for place, graph in enumerate(graphs)}
    everywhere = np.ones(len(host), np.bool_)
    regions = rows_named(trace, host, everywhere, lambda name: graph_key(name) in number)
    rows = np.flatnonzero(regions)
    names = [number[graph_key(trace.strings[code])] for code in host.name[rows].tolist()]
    operators = host.kind == HostKind.OPERATOR
    inside = np.flatnonzero(operators)
    around = nearest_of(host, operators | regions, host.parent[inside])
    direct = (around >= 0) & regions[np.maximum(around, 0)]
    children, around = inside[direct], around[direct]
    order = np.lexsort((host.start_ns[children], around))
    children, around = children[order], around[order]
    return _GraphRuns(rows, names, children, np.searchsorted(around, np.append(rows, len(host))))


def graph_key(name: str) -> str:
    """Of the graph that an event of this name runs; empty for other events."""
    match = REGION.match(name)
    return match[1] if match else ""


def _same_runs(
    trace: Trace, runs: _GraphRuns
) -> Iterator[tuple[int, NDArray[np.intp], tuple[str, ...]]]:
    """Runs of one graph with the same operators: its number, theirs, and the operators' names."""
    groups: dict[tuple[int, bytes], list[int]] = {}
    codes = trace.host.name[runs.children]
    for run, (first, last) in enumerate(pairwise(runs.edges.tolist())):
        groups.setdefault((runs.graph[run], codes[first:last].tobytes()), []).append(run)
    for (graph, _), same in groups.items():
        first, last = runs.edges[same[0]], runs.edges[same[0] + 1]
        names = tuple(trace.strings[code] for code in codes[first:last].tolist())
        yield graph, np.array(same, np.intp), names


def _on_host(
    trace: Trace, graphs: Sequence[CompiledGraph], runs: _GraphRuns
) -> Iterator[_PieceColumns]:
    host = trace.host
    for graph, same, names in _same_runs(trace, runs):
        kernels = graphs[graph].kernels
        calls = np.array(align_operators(names, kernels), np.int32)
        count = len(names)
        events = runs.children[runs.edges[same][:, None] + np.arange(count)]
        begins, ends = host.start_ns[events], host.start_ns[events] + host.dur_ns[events]
        starts = host.start_ns[runs.rows[same]][:, None]
        stops = starts + host.dur_ns[runs.rows[same]][:, None]
        gaps = np.concatenate((begins, stops), 1) - np.concatenate((starts, ends), 1)
        shares = _share_gaps(calls, kernels)
        between = np.maximum(gaps, 0) @ shares  # runs x kernels
        unknown = calls < 0
        if unknown.any():  # operators that the code does not name are part of what is around them
            between += host.dur_ns[events[:, unknown]] @ shares[:-1][unknown]
        yield _columns(runs, same, graph, calls[~unknown], events[:, ~unknown], trace)
        loops = np.flatnonzero(shares.any(0)).astype(np.int32)
        yield _PieceColumns(
            region=np.repeat(runs.rows[same], len(loops)).astype(np.int32),
            graph=np.full(len(same) * len(loops), graph, np.int32),
            kernel=np.tile(loops, len(same)),
            event=np.full(len(same) * len(loops), ABSENT, np.int32),
            dur_ns=np.rint(between[:, loops]).astype(np.int64).ravel(),
        )


def _columns(
    runs: _GraphRuns, same: Indices, graph: int, calls: Int32s, events: Indices, trace: Trace
) -> _PieceColumns:
    return _PieceColumns(
        region=np.repeat(runs.rows[same], len(calls)).astype(np.int32),
        graph=np.full(events.size, graph, np.int32),
        kernel=np.tile(calls, len(same)),
        event=events.ravel().astype(np.int32),
        dur_ns=trace.host.dur_ns[events.ravel()],
    )


def _share_gaps(calls: Int32s, kernels: Sequence[GraphKernel]) -> NDArray[np.float64]:
    """Of the time before each operator, and after the last: the share of each call of the code.

    Without a loop there, it is the cost of making the next call.
    """
    shares = np.zeros((len(calls) + 1, len(kernels)))
    if not kernels:
        return shares
    edges = [call for call in calls.tolist() if call >= 0]
    passed = 0  # operators of the code so far
    for gap in range(len(calls) + 1):
        first = edges[passed - 1] + 1 if passed else 0
        last = edges[passed] if passed < len(edges) else len(kernels)
        loops = [n for n in range(first, last) if kernels[n].operator is None]
        loops = loops or list(range(first, last)) or [min(last, len(kernels) - 1)]
        weights = np.array([max(kernels[n].size_bytes or 0, _LEAST_BYTES) for n in loops], float)
        shares[gap, loops] = weights / weights.sum()
        if gap < len(calls) and calls[gap] >= 0:
            passed += 1
    return shares


def _on_device(
    trace: Trace, graphs: Sequence[CompiledGraph], runs: _GraphRuns
) -> Iterator[_PieceColumns]:
    host, device = trace.host, trace.device
    work = np.flatnonzero((device.kind <= DeviceKind.MEMSET) & (device.launch >= 0))
    run_row = nearest_of(host, mark_rows(len(host), runs.rows), device.launch[work])
    work, run_row = work[run_row >= 0], run_row[run_row >= 0]
    order = np.lexsort((device.start_ns[work], run_row))
    work, run_row = work[order], run_row[order]
    by_operator = _calls_by_operator(trace, graphs, runs, device.launch[work])
    edges = np.searchsorted(run_row, np.append(runs.rows, len(host)))
    groups: dict[tuple[int, bytes, bytes], list[int]] = {}
    for run, (first, last) in enumerate(pairwise(edges.tolist())):
        part = slice(first, last)
        key = (runs.graph[run], device.name[work[part]].tobytes(), by_operator[part].tobytes())
        groups.setdefault(key, []).append(run)
    for (graph, _, _), same in groups.items():
        part = slice(*edges[same[0] : same[0] + 2].tolist())
        names = [trace.strings[code] for code in device.name[work[part]].tolist()]
        calls = align_kernels(names, by_operator[part].tolist(), graphs[graph].kernels)
        places = (edges[np.array(same)][:, None] + np.arange(len(names))).ravel()
        yield _PieceColumns(
            region=run_row[places],
            graph=np.full(len(places), graph, np.int32),
            kernel=np.tile(np.array(calls, np.int32), len(same)),
            event=work[places].astype(np.int32),
            dur_ns=device.dur_ns[work[places]],
        )


def _calls_by_operator(
    trace: Trace, graphs: Sequence[CompiledGraph], runs: _GraphRuns, launch: Int32s
) -> Int32s:
    """For each launch, the call of the code by the operator around it, or -1."""
    call = np.full(len(trace.host), ABSENT, np.int32)
    for graph, same, names in _same_runs(trace, runs):
        events = runs.children[runs.edges[same][:, None] + np.arange(len(names))]
        call[events] = np.array(align_operators(names, graphs[graph].kernels), np.int32)
    child = nearest_of(trace.host, mark_rows(len(trace.host), runs.children), launch)
    return np.where(child >= 0, call[np.maximum(child, 0)], ABSENT).astype(np.int32)


def mark_rows(size: int, rows: Indices) -> Bools:
    """True at these rows."""
    marked = np.zeros(size, np.bool_)
    marked[rows] = True
    return marked
