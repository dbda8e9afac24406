"""The calls of compiled graphs in a trace, and their time divided among the calls in their code."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.explain.flops.prices import REGION, graph_key
from stepscope.records.compiled import CompiledGraph, GraphKernel
from stepscope.records.trace import ABSENT, DeviceKind, HostKind, Trace
from stepscope.step.arrays import Bools, Indices, Int32s, Int64s
from stepscope.step.work import rows_named
from stepscope.text.words import lazy_pattern
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from stepscope.explain.rank_analysis import RankAnalysis

# The calls of compiled graphs in a trace: which graph, in which region, and when it computes.

DYNAMO_REGION = lazy_pattern(r"^Torch-Compiled Region: (\d+/\d+)")
_FORWARD, _BACKWARD = "CompiledFunction", "CompiledFunctionBackward"


class GraphCalls(msgspec.Struct, frozen=True, kw_only=True):
    """One row per call, in the order of time."""

    rows: Indices  # host rows
    start_ns: Int64s  # on the host
    end_ns: Int64s
    region: Int32s  # host row of dynamo's region around it; -1 in backward
    backward: Bools
    forward: Int32s  # in backward: index of the call whose backward this is; -1: not known
    first_ns: Int64s  # the device computes for it from here
    last_ns: Int64s  # to here; on the CPU both are the host's
    busy_ns: Int64s

    def __len__(self) -> int:
        return len(self.rows)


def find_graph_calls(analysis: RankAnalysis) -> GraphCalls:
    """Those in the steady steps."""
    return _find_calls(analysis, analysis.steady_steps.holds(analysis.trace.host.start_ns))


def find_all_graph_calls(analysis: RankAnalysis) -> GraphCalls:
    """Those of the whole trace."""
    return _find_calls(analysis, np.ones(len(analysis.trace.host), np.bool_))


def _find_calls(analysis: RankAnalysis, among: Bools) -> GraphCalls:
    """Inductor marks each call; older versions only show autograd's function around it."""
    trace, host = analysis.trace, analysis.trace.host
    calls = _named(trace, lambda name: REGION.match(name) is not None)
    if not calls.any():
        calls = _named(trace, lambda name: name in (_FORWARD, _BACKWARD))
    calls &= among
    rows = np.flatnonzero(calls)
    rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
    regions = _named(trace, lambda name: DYNAMO_REGION.match(name) is not None)
    start, end = host.start_ns[rows], host.start_ns[rows] + host.dur_ns[rows]
    first, last, busy = start, end, host.dur_ns[rows]
    if not analysis.work.on_host:
        first, last, busy = _device_time_of_calls(trace, calls, rows)
    return GraphCalls(
        rows=rows,
        start_ns=start,
        end_ns=end,
        region=nearest_of(host, regions, rows),
        backward=nearest_of(host, _named(trace, _BACKWARD.__eq__), rows) >= 0,
        forward=_forward_calls(trace, rows),
        first_ns=first,
        last_ns=last,
        busy_ns=busy,
    )


def _named(trace: Trace, matches: Callable[[str], object]) -> Bools:
    everywhere = np.ones(len(trace.host), np.bool_)
    return rows_named(trace, trace.host, everywhere, matches)


def _device_time_of_calls(
    trace: Trace, calls: Bools, rows: Indices
) -> tuple[Int64s, Int64s, Int64s]:
    """First start, last end and sum of the kernels that each call launched; -1 without any."""
    device = trace.device
    work = np.flatnonzero(device.kind <= DeviceKind.MEMSET)
    call = nearest_of(trace.host, calls, device.launch[work])
    work, call = work[call >= 0], call[call >= 0]
    never = np.iinfo(np.int64)
    first = np.full(len(trace.host), never.max, np.int64)
    last = np.full(len(trace.host), ABSENT, np.int64)
    busy = np.zeros(len(trace.host), np.int64)
    np.minimum.at(first, call, device.start_ns[work])
    np.maximum.at(last, call, device.start_ns[work] + device.dur_ns[work])
    np.add.at(busy, call, device.dur_ns[work])
    first[last < 0] = ABSENT
    return first[rows], last[rows], busy[rows]


def _forward_calls(trace: Trace, rows: Indices) -> Int32s:
    """By autograd's links from a backward function to its forward one."""
    host = trace.host
    forward = _named(trace, _FORWARD.__eq__)
    backward = _named(trace, _BACKWARD.__eq__)
    index = np.full(len(host), ABSENT, np.int32)
    around = nearest_of(host, forward, rows)
    inside = np.flatnonzero(around >= 0)
    index[around[inside]] = inside
    function = nearest_of(host, backward, rows)
    linked = np.where(function >= 0, host.forward_of[np.maximum(function, 0)], ABSENT)
    return np.where(linked >= 0, index[np.maximum(linked, 0)], ABSENT).astype(np.int32)


# The time of compiled graphs, divided among the calls in their code.
#
# On an accelerator each kernel belongs to the call that launched it. A CPU's trace shows only what
# Inductor left to a library; its own loops ran between these operators, in the order of the code.
# Several loops between two operators share the time there by the bytes that they touch.

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
        else _device_pieces(analysis.trace, graphs, runs)
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


def _device_pieces(
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


# Events of one run of a compiled graph, and the calls of its code that made them.
#
# Both are in the same order. Kernels that Inductor wrote have their own names in a trace; a
# library's call shows as an operator. What a CUDA graph replays has neither operators nor, for a
# library's kernels, names that the code knows: those lie between kernels that it does know.


def align_operators(names: Sequence[str], kernels: Sequence[GraphKernel]) -> list[int]:
    """For each operator right inside the graph's run: the call that it is, or -1."""
    known = {one.operator or one.name for one in kernels}
    present = set(names)
    wanted = [place for place, one in enumerate(kernels) if (one.operator or one.name) in present]
    seen = [place for place, name in enumerate(names) if name in known]
    found = [ABSENT] * len(names)
    code = [kernels[place].operator or kernels[place].name for place in wanted]
    if [names[place] for place in seen] == code:
        for place, call in zip(seen, wanted, strict=True):
            found[place] = call
        return found
    places: dict[str, list[int]] = {}
    for number, name in enumerate(code):
        places.setdefault(name, []).append(number)
    following = 0
    for place in seen:  # operators that the code does not have are left out
        calls = places.get(names[place], [])
        ahead = bisect_left(calls, following)
        if ahead < len(calls):
            found[place], following = wanted[calls[ahead]], calls[ahead] + 1
    return found


def align_kernels(
    names: Sequence[str], operator: Sequence[int], kernels: Sequence[GraphKernel]
) -> list[int]:
    """For each kernel on the device: the call that launched it, or -1.

    `operator` is the call by the operator around its launch, -1 where there is none.
    """
    found = list(operator)
    places: dict[str, list[int]] = {}
    for place, one in enumerate(kernels):
        if one.operator is None:
            places.setdefault(one.name, []).append(place)
    times: dict[str, int] = {}
    for event, name in enumerate(names):
        calls = places.get(name)
        if calls:
            number = times.get(name, 0)
            times[name] = number + 1
            found[event] = calls[number % len(calls)]
    _fill_between(found, kernels)
    return found


def _fill_between(found: list[int], kernels: Sequence[GraphKernel]) -> None:
    """Events between two known ones belong to the library's calls between these."""
    known = [event for event, call in enumerate(found) if call >= 0]
    edges = [(ABSENT, ABSENT), *((event, found[event]) for event in known)]
    edges.append((len(found), len(kernels)))
    for (event, call), (next_event, next_call) in pairwise(edges):
        unknown = range(event + 1, next_event)
        between = [n for n in range(call + 1, next_call) if kernels[n].operator is not None]
        for number, place in enumerate(unknown):
            if between:
                found[place] = between[number * len(between) // len(unknown)]
