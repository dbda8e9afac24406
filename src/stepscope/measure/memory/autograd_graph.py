"""The autograd graph as a table: what each node keeps for backward, what it hands on, and
which kept values could be recomputed. Only reads.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stepscope.measure.memory.storages import Key, pieces, tensors_in
from stepscope.measure.patches import unseen

# What another precision, another batch or recomputed blocks would keep can be worked out from it.

_MOST_NODES = 50_000
_OLDER = -1  # the place of a node that this step did not make
ACTIVATION, STATE, INPUT = "activation", "state", "input"


class BackwardGraph:
    """Nodes in the order in which forward made them, the leaves last."""

    def __init__(self, states: Iterable[Key], inputs: Collection[Key], notes: set[str]) -> None:
        """`states` are storages of parameters, gradients, buffers and the optimizer."""
        self.saved_bytes = 0  # of activations
        self.hidden = 0  # nodes made under the script's own hooks: what they keep is not seen
        self._states, self._inputs, self._notes = set(states), inputs, notes
        self._places: dict[int, int] = {}
        self._storages: dict[Key, int] = {}
        self._rows: list[tuple[int, str]] = []  # of storages: bytes and kind
        self._nodes: list[list[Any]] = []
        self._met: list[Any] = []  # a wrapper's id is unique only while it lives

    def walk(self, outputs: Sequence[Any], *, first: int) -> Iterator[Any]:
        """The nodes to add, in order; those with numbers below `first` are older than the step."""
        todo = [node_of(output) for output in outputs]
        met: dict[int, Any] = {}
        while todo:
            node = todo.pop()
            if node is None or id(node) in met:
                continue
            if not is_leaf(node) and node._sequence_nr() < first:
                continue
            met[id(node)] = node
            todo.extend(following for following, _ in node.next_functions)
        if len(met) > _MOST_NODES:
            self._notes.add(f"the graph has more than {_MOST_NODES} nodes: not recorded")
            return
        self._met = sorted(met.values(), key=lambda node: int(node._sequence_nr()))
        self._places = {id(node): place for place, node in enumerate(self._met)}
        yield from self._met

    def add(self, node: Any, module: int | None) -> None:
        """`module` is the id of the one that made the node, None if hooks hide what it keeps."""
        hidden = module is None
        self.hidden += hidden
        leaf = is_leaf(node)
        self._nodes.append(
            [
                LEAF if leaf else node.name(),
                module or 0,
                [[math.prod(meta.shape), _dtype(meta)] for meta in node._input_metadata],
                [[self._places.get(id(to), _OLDER), place] for to, place in node.next_functions],
                [] if hidden or leaf else [*self._saved(node)],
            ]
        )

    def _saved(self, node: Any) -> Iterator[list[Any]]:
        """Field, storage, elements and dtype of each tensor that a node keeps."""
        for name, tensor in saved_by(node, self._notes):
            for piece in pieces(tensor, self._notes):
                of_parameter = is_parameter(tensor)
                if piece.key not in self._storages:
                    kind = ACTIVATION
                    if of_parameter or piece.key in self._states:
                        kind = STATE
                    elif piece.key in self._inputs:
                        kind = INPUT
                    self.saved_bytes += piece.size_bytes if kind == ACTIVATION else 0
                    self._storages[piece.key] = len(self._rows)
                    self._rows.append((piece.size_bytes, kind))
                storage = self._storages[piece.key]
                yield [name, storage, tensor.numel(), _dtype(tensor)]

    def content(self, modules: Sequence[tuple[int, list[Any]]]) -> dict[str, Any]:
        """For memory.json; `modules` are ids with what is written about each."""
        numbers: Mapping[int, int] = {ident: place for place, (ident, _) in enumerate(modules)}
        for node in self._nodes:
            node[1] = numbers.get(node[1], -1)
        return {
            "modules": [row for _, row in modules],
            "storages": [list(row) for row in self._rows],
            "nodes": self._nodes,
            "hidden": self.hidden,
        }

    def forget(self) -> None:
        """Let go of the nodes, which would keep the graph alive."""
        self._met.clear()


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


# One node of the autograd graph: what it keeps for backward, and what it hands on.
#
# Everything here only reads, and runs none of the script's code.

LEAF = "AccumulateGrad"
_PREFIX = "_saved_"


def node_of(output: Any) -> Any:
    """The node of a tensor or a GradientEdge."""
    return output.grad_fn if isinstance(output, torch.Tensor) else getattr(output, "node", None)


def is_leaf(node: Any) -> bool:
    """Whether it accumulates the gradient of a parameter."""
    return type(node).__name__ == LEAF


def is_parameter(tensor: Any) -> bool:
    """A weight or a view of one, including one that FSDP has gathered."""
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(_PREFIX))


def saved_by(node: Any, notes: set[str]) -> Iterator[tuple[str, Any]]:
    """The tensors a node holds, each with the name of its field."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        fields: tuple[str, ...] = ("saved_tensors", "__dict__")
    else:
        kind: Any = type(node)
        fields = _fields(kind)
        if not fields and "CppNode" in node.name():
            notes.add(f"what the C++ function {node.name()} saved cannot be seen: not counted")
    for name in fields:
        try:
            with unseen():  # it unpacks into a new tensor
                value = getattr(node, name)
        except RuntimeError:  # freed, or changed in place: backward itself will report it
            notes.add(f"a tensor saved by {node.name()} could not be read: not counted")
            continue
        for tensor in tensors_in(value, depth=2):
            yield name.removeprefix(_PREFIX), tensor


# Which of the values kept for backward could be computed again from others that are kept.
#
# A value is free if a cheap operator made it and everything that this operator read is kept, or can
# itself be made from what is kept by cheap operators alone. Nodes stand for operators; an older
# node has a smaller number.

_MOST_ROWS = 60
_NUMBERED = re.compile(r"Backward\d*$")
_VIEWS = frozenset([
    "View", "UnsafeView", "Transpose", "T", "Permute", "ReshapeAlias", "Expand", "Slice", "Select",
    "Squeeze", "Unsqueeze", "Split", "SplitWithSizes", "Unbind", "Alias", "AsStrided", "Narrow",
    "UnsafeSplit", "Detach", "ViewAs", "Unfold",
])  # fmt: skip
_CHEAP = frozenset([
    "Gelu", "Silu", "Relu", "LeakyRelu", "Elu", "Celu", "Selu", "Hardswish", "Hardtanh",
    "Hardsigmoid", "Softplus", "Mish", "Sigmoid", "Tanh", "Softmax", "LogSoftmax", "LogSigmoid",
    "NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm",
    "FusedRmsNorm", "Mul", "Add", "Sub", "Rsub", "Div", "Neg", "Abs", "Pow", "Sqrt", "Rsqrt", "Exp",
    "Log", "Sin", "Cos", "Clamp", "ClampMin", "Mean", "Sum", "Var", "Cat", "Stack", "ToCopy",
    "Clone", "Copy", "CopySlices", "MaskedFill", "Where", "Repeat", "Threshold", "Prelu", "Glu",
    "AvgPool2D", "UpsampleNearest2D", "ConstantPadNd",
])  # fmt: skip


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
