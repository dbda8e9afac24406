"""The operators and source lines of each kernel, and how its time divides among the lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stepscope.explain.flops.compiled_regions import price_operator
from stepscope.explain.flops.cost import MATMUL_LIKE, OTHER
from stepscope.explain.flops.dtypes import dtype_code
from stepscope.records.lazy_pattern import lazy_pattern
from stepscope.records.trace import ABSENT
from stepscope.trace.kernel_nodes import GRAPH_VIEWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.compiled import CompiledGraph, GraphKernel, GraphOperator
    from stepscope.records.place import Place

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
    dtype: int = ABSENT  # of most of its FLOPs; code of DTYPES


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
        operators=names or _by_name(kernel),
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


def _by_name(kernel: GraphKernel) -> tuple[str, ...]:
    return (kernel.operator,) if kernel.operator else split_fused_name(kernel.name)


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
