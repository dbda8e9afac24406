"""Compiled graphs on the roofline: one row for each of their kernels' operators and source lines.

A trace of a CUDA graph shows one launch for all kernels of a compiled graph, so all that is known
of them there is the graph as a whole. Its code, which capture recorded, tells them apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stepscope.explain.call_tree import group, sum_by
from stepscope.explain.compiled.graph_kernels import open_regions
from stepscope.explain.compiled.kernel_pieces import graph_key
from stepscope.explain.flops.dtypes import DTYPES, FP32, TF32
from stepscope.explain.roofline import phase_of, place_on_roofline, widest_first
from stepscope.records.trace import ABSENT
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from stepscope.explain.arrays import Bools
    from stepscope.explain.compiled.graph_kernels import OpenedRegions
    from stepscope.explain.compiled.kernel_lines import KernelFacts
    from stepscope.explain.compiled.kernel_pieces import KernelPieces
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.records.efficiency import Phase, Spot
    from stepscope.records.place import Place

_NEGLIGIBLE = 1e-6  # of a graph's time
_MOST_NAMES = 3


class _KernelRow(NamedTuple):
    """What is one row of the table."""

    graph: int  # into the opened graphs
    operator: str
    place: Place | None
    dtype: str
    phase: Phase


class _KernelSums(NamedTuple):
    """Over the steady steps; None: of one of the kernels it is not known."""

    calls: int
    ns: int
    flops: int | None
    moved: int | None

    def plus(self, ns: int, calls: int, fact: KernelFacts) -> _KernelSums:
        return _KernelSums(
            self.calls + calls,
            self.ns + ns,
            _plus(self.flops, fact.flops, calls),
            _plus(self.moved, fact.size_bytes, calls),
        )


def open_spots(analysis: RankAnalysis, spots: tuple[Spot, ...]) -> tuple[Spot, ...]:
    """The same spots, those of compiled graphs by kernel; what is of none stays with the graph."""
    whole = [spot for spot in spots if graph_key(spot.operator)]
    if not whole:
        return spots
    opened = analysis.compute_once(open_regions)
    rows, steps = _sum_kernels(analysis, opened), analysis.steady_steps.count
    kernels = [
        place_on_roofline(
            analysis.ceilings,
            operator=row.operator,
            dtype=row.dtype,
            calls=sums.calls / steps,
            device_ns=sums.ns / steps,
            flops=None if sums.flops is None else sums.flops / steps,
            moved=None if sums.moved is None else sums.moved / steps,
            phase=row.phase,
            place=row.place,
        )
        for row, sums in rows.items()
    ]
    others = [spot for spot in spots if not graph_key(spot.operator)]
    left = (_left_of(analysis, opened, spot, rows) for spot in whole)
    return widest_first([*others, *kernels, *(spot for spot in left if spot is not None)])


def _sum_kernels(analysis: RankAnalysis, opened: OpenedRegions) -> dict[_KernelRow, _KernelSums]:
    """Of kernels that no operator of the trace answers for."""
    pieces, host = opened.pieces, analysis.trace.host
    steady = analysis.steady_steps.holds(host.start_ns[pieces.region])
    mine = np.flatnonzero(steady & (pieces.kernel != ABSENT) & _belong_to_graph(analysis, pieces))
    columns = (pieces.graph[mine], pieces.kernel[mine], analysis.costs.phase[pieces.region[mine]])
    first, place, count = group(*columns)
    total = sum_by(place, pieces.dur_ns[mine], count)
    once, _, _ = group(place, pieces.region[mine])  # a call may launch several kernels
    runs = np.bincount(place[once], minlength=count)
    rows: dict[_KernelRow, _KernelSums] = {}
    for number, sample in enumerate(mine[first].tolist()):
        graph, region = int(pieces.graph[sample]), int(pieces.region[sample])
        fact = opened.facts[graph][int(pieces.kernel[sample])]
        row = _KernelRow(
            graph=graph,
            operator=_words(fact),
            place=fact.lines[0][0] if fact.lines else None,
            dtype=_dtype(fact, int(analysis.costs.dtype[region])),
            phase=phase_of(analysis.costs, region),
        )
        before = rows.get(row, _KernelSums(0, 0, 0, 0))
        rows[row] = before.plus(int(total[number]), int(runs[number]), fact)
    return rows


def _belong_to_graph(analysis: RankAnalysis, pieces: KernelPieces) -> Bools:
    """Whether the graph, and no operator inside it, answers for a piece in `list_spots`."""
    costs = analysis.costs
    if analysis.work.on_host:
        row = nearest_of(analysis.trace.host, costs.answering, np.maximum(pieces.event, 0))
        row[pieces.event == ABSENT] = pieces.region[pieces.event == ABSENT]
    else:
        row = costs.operator[pieces.event]
    mine: Bools = row == pieces.region
    return mine


def _dtype(fact: KernelFacts, of_graph: int) -> str:
    """In which its products are computed: the kernels' names say whether fp32 is tf32."""
    if not fact.flops or fact.dtype < 0:
        return ""
    return DTYPES[TF32 if fact.dtype == FP32 and of_graph == TF32 else fact.dtype]


def _words(fact: KernelFacts) -> str:
    """The operators of one kernel, the costliest first."""
    if not fact.operators:
        return fact.name
    names = " + ".join(fact.operators[:_MOST_NAMES])
    return f"{names} + ..." if len(fact.operators) > _MOST_NAMES else names


def _left_of(
    analysis: RankAnalysis, opened: OpenedRegions, spot: Spot, rows: dict[_KernelRow, _KernelSums]
) -> Spot | None:
    """What a graph's kernels do not explain of it; all of it where its code was not captured."""
    keys = [graph.key for graph in opened.pieces.graphs]
    key, steps = graph_key(spot.operator), analysis.steady_steps.count
    mine = [
        sums for row, sums in rows.items() if keys[row.graph] == key and row.phase == spot.phase
    ]
    left_ns = spot.device_ns - sum(sums.ns for sums in mine) / steps
    if left_ns <= _NEGLIGIBLE * spot.device_ns:
        return None
    found = sum(sums.flops or 0 for sums in mine) / steps
    graph = opened.pieces.graphs[keys.index(key)] if key in keys else None
    return place_on_roofline(
        analysis.ceilings,
        operator=f"compiled graph {graph.region}" if graph and graph.region else "compiled graph",
        dtype=spot.dtype,
        calls=spot.calls,
        device_ns=left_ns,
        flops=None if spot.flops is None else max(0.0, spot.flops - found),
        moved=None,
        phase=spot.phase,
    )


def _plus(sum_before: int | None, amount: int | None, calls: int) -> int | None:
    return None if sum_before is None or amount is None else sum_before + amount * calls
