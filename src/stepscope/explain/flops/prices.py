"""Price every distinct call of a trace once, and the graphs that torch.compile made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.explain.flops import memory_bound, products  # noqa: F401
from stepscope.explain.flops.call import (
    FP32,
    MATMUL_LIKE,
    OTHER,
    PREFIX,
    UNKNOWN,
    Call,
    Cost,
    Unknown,
    compiled,
    dtype_code,
)
from stepscope.records.compiled import CompiledGraph, GraphOperator
from stepscope.records.dtypes import PEAKS
from stepscope.records.hardware import Ceilings
from stepscope.records.trace import ABSENT, Trace
from stepscope.step.arrays import Bools, Int8s, Int64s
from stepscope.step.call_tree import group
from stepscope.step.work import rows_named
from stepscope.text.words import lazy_pattern
from stepscope.trace.links import nearest_of

# The fastest device needs 20 minutes for this many FLOPs: more come from damaged shapes. A backward
# pass multiplies them by up to three, and the sum must still fit 64 bits.
LARGEST = 1 << 60
_UNKNOWN_ERRORS = (
    Unknown,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    ZeroDivisionError,
    OverflowError,
)


class Signatures(msgspec.Struct, frozen=True, kw_only=True):
    """Distinct calls as columns; `of` is the distinct call of each priced row."""

    of: NDArray[np.intp]
    flops: NDArray[np.int64]
    again: NDArray[np.int64]
    moved: NDArray[np.int64]
    list_elements: NDArray[np.int64]
    list_passes: NDArray[np.int64]
    dtype: NDArray[np.int8]
    calls: tuple[Call, ...]


def price(trace: Trace, rows: NDArray[np.intp]) -> Signatures:
    """The cost of host rows whose operators are in the tables."""
    host = trace.host
    columns = [column[rows] for column in (host.shapes, host.dtypes, host.concrete, host.name)]
    first, of, _ = group(*columns)
    distinct = [column[first].tolist() for column in columns]
    texts: dict[int, Any] = {-1: None}
    calls, costs = [], []
    for *codes, name in zip(*distinct, strict=True):
        shapes, kinds, concrete = (_decoded(trace.strings, code, texts) for code in codes)
        call = Call(trace.strings[name], shapes, kinds, concrete)
        calls.append(call)
        costs.append(price_call(call))
    dtypes = {code: dtype_code(texts[code]) for code in set(distinct[1])}
    columns_of = {
        field: np.array([getattr(cost, field) for cost in costs], np.int64)
        for field in ("flops", "again", "moved", "list_elements", "list_passes")
    }
    times = np.bincount(of, minlength=len(costs))
    columns_of["flops"] = summable(columns_of["flops"], times)
    columns_of["again"][columns_of["flops"] < 0] = 0
    return Signatures(
        of=of,
        **columns_of,
        dtype=np.array([dtypes[code] for code in distinct[1]], np.int8),
        calls=tuple(calls),
    )


def summable(amounts: NDArray[np.int64], times: NDArray[np.int64] | int = 1) -> NDArray[np.int64]:
    """Amounts whose sum, each counted `times`, fits 64 bits: the largest become unknown."""
    order = np.argsort(amounts, kind="stable")
    total = np.cumsum((np.maximum(amounts, 0).astype(np.float64) * times)[order])
    if not len(total) or total[-1] < LARGEST:
        return amounts
    limited = amounts.copy()
    limited[order[total >= LARGEST]] = UNKNOWN
    return limited


def _decoded(strings: Sequence[str], code: int, known: dict[int, Any]) -> Any:
    if code not in known:
        try:
            known[code] = msgspec.json.decode(strings[code])
        except msgspec.DecodeError:
            known[code] = None
    return known[code]


def price_call(call: Call) -> Cost:
    """The cost of one call; unknown where shapes are missing or damaged."""
    multiplies = call.name in MATMUL_LIKE
    formula = MATMUL_LIKE.get(call.name) or OTHER.get(call.name)
    if formula is None and call.name.startswith(PREFIX):
        formula = compiled
    try:
        cost = formula(call) if formula else Cost(flops=UNKNOWN)
    except _UNKNOWN_ERRORS:
        return Cost(flops=UNKNOWN if multiplies else 0)
    amounts = (cost.flops, cost.moved, cost.list_elements)
    if max(amounts) >= LARGEST or min(amounts) < UNKNOWN:  # damaged shapes
        return Cost(flops=UNKNOWN if multiplies else 0)
    return cost


# FLOPs of compiled graphs, where the trace does not show all of their products.
#
# Inside `## Call CompiledFxGraph <key> ##` a trace has the products that Inductor left to a
# library. Those it wrote itself, and all of a CUDA graph, have no shapes there. The graph that
# capture recorded has them, so what the trace lacks of the graph's FLOPs is the region's own.

REGION = lazy_pattern(r"^## Call CompiledFxGraph (\S+) ##$")
# Without a device's rates: one core that computes from memory. Only their ratio matters.
CORE_RATES = (20e9, 5e9)
_ROUNDING = 0.001  # of a graph's FLOPs: less is not worth attributing


class GraphCost(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a compiled graph."""

    flops: int | None  # None: a product has sizes that are not known
    dtype: int  # of most of them; code of PEAKS
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
    dtype = PEAKS[cost.dtype] if cost and cost.dtype >= 0 else "fp32"
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
    regions = rows_named(trace, host, everywhere, lambda name: graph_key(name) in known)
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
    of_names = [known[graph_key(trace.strings[code])] for code in codes.tolist()]
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


def graph_key(name: str) -> str:
    """Of the graph that an event of this name runs; empty for other events."""
    match = REGION.match(name)
    return match[1] if match else ""
