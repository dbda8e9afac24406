"""FLOPs of compiled graphs, where the trace does not show all of their products.

Inside `## Call CompiledFxGraph <key> ##` a trace has the products that Inductor left to a library.
Those it wrote itself, and all of a CUDA graph, have no shapes there. The graph that capture
recorded has them, so what the trace lacks of the graph's FLOPs is the region's own.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.flops.call import Call
from stepscope.explain.flops.cost import MATMUL_LIKE
from stepscope.explain.flops.dtypes import DTYPES, FP32, dtype_code
from stepscope.explain.flops.signatures import LARGEST, price_call
from stepscope.explain.work import rows_named
from stepscope.records.lazy_pattern import lazy_pattern
from stepscope.records.trace import ABSENT
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.arrays import Bools, Int8s, Int64s
    from stepscope.explain.flops.cost import Cost
    from stepscope.records.compiled import CompiledGraph, GraphOperator
    from stepscope.records.efficiency import Ceilings
    from stepscope.records.trace import Trace

REGION = lazy_pattern(r"^## Call CompiledFxGraph (\S+) ##$")
# Without a device's rates: one core that computes from memory. Only their ratio matters.
CORE_RATES = (20e9, 5e9)
_ROUNDING = 0.001  # of a graph's FLOPs: less is not worth attributing


class GraphCost(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a compiled graph."""

    flops: int | None  # None: a product has sizes that are not known
    dtype: int  # of most of them; code of DTYPES
    again: int = 0  # of them, what fused attention computes again in backward
    in_fp32: int = 0  # of them, what has inputs in fp32


def price_operator(operator: GraphOperator) -> Cost:
    """By the formulas for calls of a trace."""
    return price_call(Call(operator.name, operator.shapes, operator.dtypes, operator.concrete))


def price_graph(graph: CompiledGraph) -> GraphCost:
    """All products of a graph; unknown without its operators."""
    total = again = 0
    by_dtype: Counter[int] = Counter()
    for operator in graph.operators:
        if operator.name not in MATMUL_LIKE:
            continue
        cost = price_operator(operator)
        if cost.flops < 0:
            return GraphCost(flops=None, dtype=ABSENT)
        total += cost.flops
        again += cost.again
        by_dtype[dtype_code(operator.dtypes)] += cost.flops
    if not graph.operators or total >= LARGEST:  # damaged shapes
        return GraphCost(flops=None, dtype=ABSENT)
    dtype = max(by_dtype, key=by_dtype.__getitem__, default=ABSENT)
    return GraphCost(flops=total, dtype=dtype, again=again, in_fp32=by_dtype.get(FP32, 0))


def graph_rates(cost: GraphCost | None, ceilings: Ceilings | None) -> tuple[float, float]:
    """FLOP/s and bytes per second at which a graph computes at best."""
    dtype = DTYPES[cost.dtype] if cost and cost.dtype >= 0 else "fp32"
    flops_s = ceilings.flops.get(dtype) if ceilings else None
    bytes_s = ceilings.bytes_s if ceilings else None
    return (flops_s, bytes_s) if flops_s and bytes_s else CORE_RATES


class RegionColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of `Costs` that compiled regions fill in."""

    flops: Int64s
    again: Int64s
    counted: Bools
    answering: Bools
    dtype: Int8s
    in_fp32: Int64s


def fill_regions(trace: Trace, graphs: Sequence[CompiledGraph], columns: RegionColumns) -> None:
    """Give each region what its graph computes and its rows do not show."""
    costs = {graph.key: price_graph(graph) for graph in graphs}
    known = {key: cost for key, cost in costs.items() if cost.flops is not None}
    if not known:
        return
    host = trace.host
    everywhere = np.ones(len(host), np.bool_)
    regions = rows_named(trace, host, everywhere, lambda name: _key(name) in known)
    rows = np.flatnonzero(regions)
    if not len(rows):
        return
    inside = np.flatnonzero(columns.counted)
    around = nearest_of(host, regions, inside)
    shown, shown_again, shown_fp32 = np.zeros((3, len(host)), np.int64)
    held = around >= 0
    np.add.at(shown, around[held], columns.flops[inside[held]])
    np.add.at(shown_again, around[held], columns.again[inside[held]])
    in_fp32 = np.where(columns.dtype == FP32, columns.flops, 0)
    np.add.at(shown_fp32, around[held], in_fp32[inside[held]])
    unpriced = np.flatnonzero(columns.answering & (columns.flops < 0))
    hidden = unpriced[nearest_of(host, regions, unpriced) >= 0]
    columns.flops[hidden] = 0  # their FLOPs are among the region's
    columns.answering[hidden] = False
    codes, which = np.unique(host.name[rows], return_inverse=True)
    of_names = [known[_key(trace.strings[code])] for code in codes.tolist()]
    whole = np.array([cost.flops for cost in of_names], np.int64)[which]
    missing = whole - shown[rows]
    owed = missing > _ROUNDING * whole
    if missing[owed].astype(np.float64).sum() >= LARGEST:
        return
    columns.flops[rows[owed]] = missing[owed]
    again = np.array([cost.again for cost in of_names], np.int64)[which] - shown_again[rows]
    columns.again[rows[owed]] = np.clip(again, 0, missing)[owed]
    in_fp32 = np.array([cost.in_fp32 for cost in of_names], np.int64)[which] - shown_fp32[rows]
    columns.in_fp32[rows[owed]] = np.clip(in_fp32, 0, missing)[owed]
    columns.dtype[rows[owed]] = np.array([cost.dtype for cost in of_names], np.int8)[which][owed]
    columns.counted[rows[owed]] = columns.answering[rows[owed]] = True


def _key(name: str) -> str:
    match = REGION.match(name)
    return match[1] if match else ""
