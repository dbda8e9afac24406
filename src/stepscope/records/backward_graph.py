"""The autograd graph of one backward pass, as capture wrote it into memory.json."""

from __future__ import annotations

from typing import Literal

import msgspec

from stepscope.records.limits import Bytes, Count  # noqa: TC001 - msgspec reads them

StorageKind = Literal["activation", "state", "input"]
LEAF = "AccumulateGrad"


class GraphOutput(msgspec.Struct, frozen=True, array_like=True):
    """A result of a forward operator, and so the gradient that its node receives."""

    elements: Count
    dtype: str


class GraphEdge(msgspec.Struct, frozen=True, array_like=True):
    """The node that made an input, and which of its results that is."""

    node: int  # -1: the input needs no gradient
    output: Count


class GraphSaved(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a node keeps until it has run."""

    field: str  # PyTorch's name of it: self, mat2, result
    storage: Count
    elements: Count
    dtype: str


class GraphStorage(msgspec.Struct, frozen=True, array_like=True):
    size_bytes: Bytes
    kind: StorageKind


class GraphModule(msgspec.Struct, frozen=True, array_like=True):
    path: str
    type: str
    elements: Count  # of its parameters
    recomputes: bool  # transformers would checkpoint it


class GraphNode(msgspec.Struct, frozen=True, array_like=True):
    name: str  # AddmmBackward0, or LEAF for a parameter's gradient
    module: int  # that called the operator, -1 for none
    outputs: list[GraphOutput]
    inputs: list[GraphEdge]
    saved: list[GraphSaved]

    @property
    def is_leaf(self) -> bool:
        return self.name == LEAF


class CapturedBackward(msgspec.Struct, frozen=True):
    """Nodes in the order in which forward made them, leaves last."""

    modules: list[GraphModule] = []
    storages: list[GraphStorage] = []
    nodes: list[GraphNode] = []
    hidden: Count = 0  # nodes made under the script's own hooks: what they keep is not known

    @property
    def is_sound(self) -> bool:
        """Whether every number in it names something that exists."""
        return all(
            node.module < len(self.modules)
            and all(
                edge.node < len(self.nodes)
                and (edge.node < 0 or edge.output < max(1, len(self.nodes[edge.node].outputs)))
                for edge in node.inputs
            )
            and all(saved.storage < len(self.storages) for saved in node.saved)
            for node in self.nodes
        )
