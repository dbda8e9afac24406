"""What each kernel of a compiled graph takes of the step, and how its time divides among
operators and source lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from stepscope.explain.compiled.graph_calls import (
    KernelPieces,
    divide_regions,
    find_graph_calls,
    mark_rows,
)
from stepscope.explain.flops.call import MATMUL_LIKE, OTHER, dtype_code
from stepscope.explain.flops.prices import graph_key, graph_rates, price_graph, price_operator
from stepscope.records.compiled import (
    GRAPH_VIEWS,
    CompiledGraph,
    GraphKernel,
    GraphOperator,
    KernelTime,
)
from stepscope.records.source_lines import Place
from stepscope.records.trace import ABSENT, DeviceKind, HostKind
from stepscope.step.arrays import Bools, Int32s
from stepscope.step.call_tree import group, sum_by
from stepscope.step.phases import in_optimizer_step, places_of_steps
from stepscope.step.work import rows_named
from stepscope.text.words import lazy_pattern
from stepscope.trace.links import distinct, nearest_of

if TYPE_CHECKING:
    from stepscope.explain.rank_analysis import RankAnalysis

_MOST_KERNELS = 48
_MOST_PLACES = 4


class GraphKernels(NamedTuple):
    """One compiled graph in the steady steps."""

    times: tuple[KernelTime, ...]  # the longest first
    line_shares: dict[Place, float]  # of the graph's time


class OpenedRegions(msgspec.Struct, frozen=True, kw_only=True):
    """The pieces of compiled graphs, and what each of their kernels is."""

    pieces: KernelPieces
    facts: tuple[tuple[KernelFacts, ...], ...]  # by graph and kernel

    def fact(self, graph: int, kernel: int) -> KernelFacts | None:
        return self.facts[graph][kernel] if kernel >= 0 else None


def open_regions(analysis: RankAnalysis) -> OpenedRegions:
    """Of the whole trace."""
    pieces = analysis.compute_once(divide_regions)
    facts = tuple(
        tuple(describe_kernels(graph, graph_rates(price_graph(graph), analysis.ceilings)))
        for graph in pieces.graphs
    )
    return OpenedRegions(pieces=pieces, facts=facts)


def time_kernels(analysis: RankAnalysis) -> dict[str, GraphKernels]:
    """By the graph's key; graphs that ran in no steady step are not in it."""
    opened = analysis.compute_once(open_regions)
    pieces, steps = opened.pieces, analysis.steady_steps.count
    steady = _steady(analysis, pieces)
    found = {}
    for number, graph in enumerate(pieces.graphs):
        mine = np.flatnonzero(steady & (pieces.graph == number))
        if not len(mine):
            continue
        size = len(graph.kernels) + 1  # the last is for what is not known
        kernel = np.where(pieces.kernel[mine] >= 0, pieces.kernel[mine], size - 1)
        total = np.bincount(kernel, pieces.dur_ns[mine], size)
        runs = len(distinct(pieces.region[mine]))
        facts = opened.facts[number]
        whole = float(total.sum()) or 1.0
        shares: dict[Place, float] = {}
        for fact, ns in zip(facts, total.tolist(), strict=False):
            for place, share in fact.lines:
                shares[place] = shares.get(place, 0.0) + share * ns / whole
        found[graph.key] = GraphKernels(
            times=_rows_by_name(facts, total, runs / steps, steps),
            line_shares=shares,
        )
    return _without_record(analysis, set(found)) | found


def _without_record(analysis: RankAnalysis, known: set[str]) -> dict[str, GraphKernels]:
    """Graphs of a bare trace: the names of their operators and kernels say what was fused."""
    trace, host, device = analysis.trace, analysis.trace.host, analysis.trace.device
    calls = analysis.compute_once(find_graph_calls)
    if analysis.work.on_host or not len(calls):
        return {}
    region = nearest_of(host, mark_rows(len(host), calls.rows), device.launch)
    rows = np.flatnonzero((region >= 0) & (device.kind <= DeviceKind.MEMSET))
    operator = nearest_of(host, host.kind == HostKind.OPERATOR, device.launch[rows])
    inside = host.start_ns[operator] >= host.start_ns[region[rows]]
    named = (operator >= 0) & inside
    name = np.where(named, host.name[np.maximum(operator, 0)], device.name[rows])
    found: dict[str, list[KernelTime]] = {}
    columns = (host.name[region[rows]], name)
    first, inverse, count = group(*columns)
    total = sum_by(inverse, device.dur_ns[rows], count)
    times = np.bincount(inverse, minlength=count)
    steps = analysis.steady_steps.count
    for number, place in enumerate(first.tolist()):
        key = graph_key(trace.strings[columns[0][place]])
        text = trace.strings[name[place]]
        if key not in known:
            found.setdefault(key, []).append(
                KernelTime(
                    name=text,
                    operators=split_fused_name(text) or ((text,) if named[place] else ()),
                    places=(),
                    calls=int(times[number]) / steps,
                    ms=int(total[number]) / steps / 1e6,
                    flops=None,
                    bytes_moved=None,
                )
            )
    return {key: GraphKernels(_longest(kernels), {}) for key, kernels in found.items()}


def _longest(kernels: Iterable[KernelTime]) -> tuple[KernelTime, ...]:
    return tuple(sorted(kernels, key=lambda one: -one.ms)[:_MOST_KERNELS])


def _steady(analysis: RankAnalysis, pieces: KernelPieces) -> Bools:
    return analysis.steady_steps.holds(analysis.trace.host.start_ns[pieces.region])


def _rows_by_name(
    facts: tuple[KernelFacts, ...], total: np.ndarray, runs: float, steps: int
) -> tuple[KernelTime, ...]:
    """Calls of one kernel for the same lines are one row."""
    rows: dict[tuple[object, ...], KernelTime] = {}
    for fact, ns in zip(facts, total.tolist(), strict=False):
        places = tuple(place for place, _ in fact.lines[:_MOST_PLACES])
        key = (fact.name, fact.operators, places, fact.flops, fact.size_bytes)
        before = rows.get(key)
        rows[key] = KernelTime(
            name=fact.name,
            operators=fact.operators,
            places=places,
            calls=runs + (before.calls if before else 0.0),
            ms=ns / steps / 1e6 + (before.ms if before else 0.0),
            flops=fact.flops,
            bytes_moved=fact.size_bytes,
        )
    return _longest(rows.values())


def share_known(analysis: RankAnalysis) -> tuple[float | None, float | None]:
    """Of the time in steady steps, the part with an operator, and the part with a source line.

    Of the device's whole time; on a CPU, of the compiled graphs' time.
    """
    opened = analysis.compute_once(open_regions)
    pieces = opened.pieces
    mine = np.flatnonzero(_steady(analysis, pieces)) if len(pieces) else np.empty(0, np.intp)
    facts = [
        opened.fact(graph, kernel)
        for graph, kernel in zip(
            pieces.graph[mine].tolist(), pieces.kernel[mine].tolist(), strict=True
        )
    ]
    has_operator = np.array([fact is not None and bool(fact.operators) for fact in facts], bool)
    has_line = np.array([fact is not None and bool(fact.lines) for fact in facts], bool)
    ns = pieces.dur_ns[mine]
    whole, operator, line = ns.sum(), ns[has_operator].sum(), ns[has_line].sum()
    if not analysis.work.on_host:
        more = _outside(analysis, pieces)
        whole, operator, line = whole + more[0], operator + more[1], line + more[2]
    return (float(operator / whole), float(line / whole)) if whole else (None, None)


def _outside(analysis: RankAnalysis, pieces: KernelPieces) -> tuple[int, int, int]:
    """The device's other time in steady steps, and its parts with an operator and with a line."""
    trace, host = analysis.trace, analysis.trace.host
    rows = analysis.work.rows
    inside = np.zeros(len(trace.device), np.bool_)
    inside[pieces.event] = True
    rows = rows[~inside[rows]]
    launch = trace.device.launch[rows]
    rows, launch = rows[launch >= 0], launch[launch >= 0]
    steady = analysis.steady_steps.holds(host.start_ns[launch])
    rows, launch = rows[steady], launch[steady]
    ns = trace.device.dur_ns[rows]
    operator = nearest_of(host, host.kind == HostKind.OPERATOR, launch)
    operator = np.maximum(operator, analysis.costs.operator[rows])
    everywhere = np.ones(len(trace.device), np.bool_)
    by_name = rows_named(trace, trace.device, everywhere, split_fused_name)[rows]
    costs = analysis.costs
    made = np.where(costs.replayed[rows], costs.operator[rows], launch)
    with_line = nearest_of(host, host.kind == HostKind.PYTHON, made) >= 0
    with_line |= _in_known_step(analysis, made)
    return int(ns.sum()), int(ns[(operator >= 0) | by_name].sum()), int(ns[with_line].sum())


def _in_known_step(analysis: RankAnalysis, rows: Int32s) -> Bools:
    """Whether an optimizer whose line capture noted launched what these rows launched."""
    trace, known = analysis.trace, places_of_steps(analysis.inputs.optimizer_lines)
    annotation = trace.host.kind <= HostKind.ANNOTATION
    named = rows_named(trace, trace.host, annotation, known.__contains__)
    mark = in_optimizer_step(trace, rows)
    return (mark >= 0) & named[np.maximum(mark, 0)]


# The operators and source lines of each kernel, and how its time divides among the lines.

_MOST_OPERATORS = 8
# Operators of many words that have no formula of their own.
_OFTEN_FUSED = frozenset(
    [
        "_to_copy",
        "native_layer_norm",
        "native_layer_norm_backward",
        "native_dropout",
        "native_dropout_backward",
        "_safe_softmax",
        "gelu_backward",
        "_log_softmax_backward_data",
        "_softmax_backward_data",
        "nll_loss_forward",
        "nll_loss_backward",
        "threshold_backward",
        "tanh_backward",
        "sigmoid_backward",
        "_native_batch_norm_legit_functional",
        "native_batch_norm_backward",
        "_unsafe_view",
        "embedding_dense_backward",
        "max_pool2d_with_indices",
        "native_group_norm",
        "native_group_norm_backward",
        "silu_backward",
        "constant_pad_nd",
        "scalar_tensor",
        "masked_fill",
        "slice_backward",
        "select_backward",
        "split_with_sizes",
        "index_put",
        "new_zeros",
        "zeros_like",
        "prepare_softmax_online",
    ]
)
_FUSED = lazy_pattern(r"_fused_(\w+?)_\d+$")


class KernelFacts(NamedTuple):
    """What one call in a graph's code computes."""

    name: str
    operators: tuple[str, ...]  # the costliest first; empty: not known
    lines: tuple[tuple[Place, float], ...]  # with the share of each; shares add up to 1
    flops: int | None  # of its products; None: not known
    size_bytes: int | None
    dtype: int = ABSENT  # of most of its FLOPs; code of PEAKS


def describe_kernels(graph: CompiledGraph, rates: tuple[float, float]) -> list[KernelFacts]:
    """In the order of the code."""
    operators = {one.node: one for one in graph.operators}
    by_library = {
        node
        for kernel in graph.kernels
        if kernel.operator is not None
        for node in kernel.nodes
        if node in operators and operators[node].name in MATMUL_LIKE
    }
    # Inductor also names a product among the nodes of loops that read its result.
    others = {node: one for node, one in operators.items() if node not in by_library}
    return [
        _describe(kernel, others if kernel.operator is None else operators, rates)
        for kernel in graph.kernels
    ]


def _describe(
    kernel: GraphKernel, operators: dict[str, GraphOperator], rates: tuple[float, float]
) -> KernelFacts:
    computed = [operators[node] for node in kernel.nodes if node in operators]
    computed = [one for one in computed if one.name not in GRAPH_VIEWS]
    seconds = [_seconds(one, rates) for one in computed]
    costliest = [one for _, one in sorted(zip(seconds, computed, strict=True), key=_first)]
    products = [one for one in computed if one.name in MATMUL_LIKE]
    flops = [price_operator(one).flops for one in products]
    largest = max(zip(flops, products, strict=True), key=lambda row: row[0], default=None)
    names = tuple(dict.fromkeys(one.name for one in costliest))[:_MOST_OPERATORS]
    return KernelFacts(
        name=kernel.name,
        operators=names
        or ((kernel.operator,) if kernel.operator else split_fused_name(kernel.name)),
        lines=_lines(computed, seconds),
        flops=None if not computed or any(one < 0 for one in flops) else sum(flops),
        size_bytes=_moved(kernel, products),
        dtype=dtype_code(largest[1].dtypes) if largest else ABSENT,
    )


def _moved(kernel: GraphKernel, products: Sequence[GraphOperator]) -> int | None:
    """Code that hands a library its arguments in a list shows only the result."""
    priced = [price_operator(one).moved for one in products]
    if kernel.operator is None or not priced or min(priced) < 0:
        return kernel.size_bytes
    return max(kernel.size_bytes or 0, sum(priced))


def _first(row: tuple[float, GraphOperator]) -> float:
    return -row[0]


def split_fused_name(name: str) -> tuple[str, ...]:
    """Operators in the name of a kernel that Inductor wrote: triton_poi_fused_add_tanh_0.

    Names of operators hold underscores too: the longest one that is known wins.
    """
    fused = _FUSED.search(name)
    if fused is None:
        return ()
    words = fused[1].split("_")
    operators, begin = [], 0
    while begin < len(words):
        ends = range(len(words), begin + 1, -1)
        known = (end for end in ends if _is_known("_".join(words[begin:end])))
        end = next(known, begin + 1)
        operators.append("_".join(words[begin:end]))
        begin = end
    return tuple(dict.fromkeys(f"aten::{one}" for one in operators if one))


def _is_known(word: str) -> bool:
    name = f"aten::{word}"
    known = name in MATMUL_LIKE or name in OTHER or word in _OFTEN_FUSED
    return known and not word.endswith("_")  # the next one may begin with it


def _seconds(operator: GraphOperator, rates: tuple[float, float]) -> float:
    """As long as its FLOPs or its bytes take."""
    cost = price_operator(operator)
    moved = cost.moved if cost.moved > 0 else operator.size_bytes or 1
    return max(max(cost.flops, 0) / rates[0], moved / rates[1])


def _lines(
    computed: Sequence[GraphOperator], seconds: Sequence[float]
) -> tuple[tuple[Place, float], ...]:
    """Operators without a line belong to the lines of the others."""
    by_place: dict[Place, float] = {}
    for operator, cost in zip(computed, seconds, strict=True):
        if operator.place is not None:
            by_place[operator.place] = by_place.get(operator.place, 0.0) + cost
    whole = sum(by_place.values())
    ordered = sorted(by_place.items(), key=lambda row: -row[1])
    return tuple((place, cost / whole) for place, cost in ordered) if whole else ()
