"""Which of the values kept for backward could be computed again from others that are kept.

A value is free if a cheap operator made it and everything that this operator read is kept, or can
itself be made from what is kept by cheap operators alone. Nodes stand for operators; an older node
has a smaller number.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from stepscope.measure.graph_nodes import is_leaf

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MOST_ROWS = 60
_NUMBERED = re.compile(r"Backward\d*$")
_VIEWS = frozenset(
    [
        "View",
        "UnsafeView",
        "Transpose",
        "T",
        "Permute",
        "ReshapeAlias",
        "Expand",
        "Slice",
        "Select",
        "Squeeze",
        "Unsqueeze",
        "Split",
        "SplitWithSizes",
        "Unbind",
        "Alias",
        "AsStrided",
        "Narrow",
        "UnsafeSplit",
        "Detach",
        "ViewAs",
        "Unfold",
    ]
)
_CHEAP = frozenset(
    [
        "Gelu",
        "Silu",
        "Relu",
        "LeakyRelu",
        "Elu",
        "Celu",
        "Selu",
        "Hardswish",
        "Hardtanh",
        "Hardsigmoid",
        "Softplus",
        "Mish",
        "Sigmoid",
        "Tanh",
        "Softmax",
        "LogSoftmax",
        "LogSigmoid",
        "NativeLayerNorm",
        "NativeGroupNorm",
        "NativeBatchNorm",
        "CudnnBatchNorm",
        "MiopenBatchNorm",
        "FusedRmsNorm",
        "Mul",
        "Add",
        "Sub",
        "Rsub",
        "Div",
        "Neg",
        "Abs",
        "Pow",
        "Sqrt",
        "Rsqrt",
        "Exp",
        "Log",
        "Sin",
        "Cos",
        "Clamp",
        "ClampMin",
        "Mean",
        "Sum",
        "Var",
        "Cat",
        "Stack",
        "ToCopy",
        "Clone",
        "Copy",
        "CopySlices",
        "MaskedFill",
        "Where",
        "Repeat",
        "Threshold",
        "Prelu",
        "Glu",
        "AvgPool2D",
        "UpsampleNearest2D",
        "ConstantPadNd",
    ]
)


@dataclass(frozen=True, slots=True)
class OperatorNode:
    """One node of the autograd graph: its operator, and the nodes that made what it read."""

    kind: str  # Gelu of GeluBackward0
    inputs: tuple[int, ...]


def describe(node: Any) -> OperatorNode:
    """Leaves are left out: weights and batches are there anyway."""
    read = [made for made, _ in node.next_functions if made is not None]
    inputs = [made for made in read if not is_leaf(made)]
    return OperatorNode(kind_of(node), tuple(made._sequence_nr() for made in inputs))


def kind_of(node: Any) -> str:
    return _NUMBERED.sub("", str(node.name()))


class KeptValue(Protocol):
    """A storage that the graph holds; `made` is the number of the node that made it."""

    size_bytes: int
    tensors: int
    made: int | None


def sum_by_producer(
    nodes: Mapping[int, OperatorNode], kept: Iterable[KeptValue]
) -> list[dict[str, Any]]:
    """Largest first: bytes by the kind of operator that made them, and how many are free."""
    kept = list(kept)
    available = _available(nodes, {value.made for value in kept if value.made is not None})
    rows: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"bytes": 0, "free_bytes": 0, "tensors": 0}
    )
    for saved in kept:
        number = _behind_views(nodes, saved.made)
        node = None if number is None else nodes.get(number)
        row = rows[node.kind if node is not None else ""]
        row["bytes"] += saved.size_bytes
        row["tensors"] += saved.tensors
        if node is not None and node.kind in _CHEAP and _has_inputs(node, available):
            row["free_bytes"] += saved.size_bytes
    ranked = sorted(rows.items(), key=lambda item: (-item[1]["bytes"], item[0]))
    return [{"producer": name, **row} for name, row in ranked[:_MOST_ROWS]]


def _available(nodes: Mapping[int, OperatorNode], made: set[int]) -> set[int]:
    """Nodes whose results are kept, or made from kept ones by cheap operators alone."""
    available = set(made)
    for number in sorted(nodes):
        node = nodes[number]
        is_cheap = node.kind in _CHEAP or node.kind in _VIEWS
        if number not in available and is_cheap and _has_inputs(node, available):
            available.add(number)
    return available


def _has_inputs(node: OperatorNode, available: set[int]) -> bool:
    return all(number in available for number in node.inputs)


def _behind_views(nodes: Mapping[int, OperatorNode], number: int | None) -> int | None:
    """The node that filled the storage."""
    while number is not None and (node := nodes.get(number)) is not None and node.kind in _VIEWS:
        number = node.inputs[0] if node.inputs else None
    return number
