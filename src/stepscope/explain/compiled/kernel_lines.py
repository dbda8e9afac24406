"""The operators and source lines of each kernel, and how its time divides among the lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stepscope.explain.flops.compiled_regions import price_operator
from stepscope.explain.flops.cost import MATMUL_LIKE
from stepscope.records.lazy_pattern import lazy_pattern
from stepscope.trace.kernel_nodes import GRAPH_VIEWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.compiled import CompiledGraph, GraphKernel, GraphOperator
    from stepscope.records.place import Place

_MOST_OPERATORS = 8
_FUSED = lazy_pattern(r"_fused_(\w+?)_\d+$")


class KernelFacts(NamedTuple):
    """What one call in a graph's code computes."""

    name: str
    operators: tuple[str, ...]  # the costliest first; empty: not known
    lines: tuple[tuple[Place, float], ...]  # with the share of each; shares add up to 1
    flops: int | None  # of its products; None: not known
    size_bytes: int | None


def describe_kernels(graph: CompiledGraph, rates: tuple[float, float]) -> list[KernelFacts]:
    """In the order of the code."""
    operators = {one.node: one for one in graph.operators}
    return [_describe(kernel, operators, rates) for kernel in graph.kernels]


def _describe(
    kernel: GraphKernel, operators: dict[str, GraphOperator], rates: tuple[float, float]
) -> KernelFacts:
    computed = [operators[node] for node in kernel.nodes if node in operators]
    computed = [one for one in computed if one.name not in GRAPH_VIEWS]
    seconds = [_seconds(one, rates) for one in computed]
    costliest = [one for _, one in sorted(zip(seconds, computed, strict=True), key=_first)]
    flops = [price_operator(one).flops for one in computed if one.name in MATMUL_LIKE]
    names = tuple(dict.fromkeys(one.name for one in costliest))[:_MOST_OPERATORS]
    return KernelFacts(
        name=kernel.name,
        operators=names or _by_name(kernel),
        lines=_lines(computed, seconds),
        flops=None if not computed or any(one < 0 for one in flops) else sum(flops),
        size_bytes=kernel.size_bytes,
    )


def _first(row: tuple[float, GraphOperator]) -> float:
    return -row[0]


def _by_name(kernel: GraphKernel) -> tuple[str, ...]:
    """Without its nodes: what a kernel's own name says, `add_tanh` for two operators."""
    if kernel.operator:
        return (kernel.operator,)
    fused = _FUSED.search(kernel.name)
    return (f"aten::{fused[1]}",) if fused else ()


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
