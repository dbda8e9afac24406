"""Whether the nodes of a pass are as they were pinned; every node is looked at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.fix.saved.node_patterns import VIEW_NODES

if TYPE_CHECKING:
    import torch

    from stepscope.fix.saved.node_patterns import NodePattern
    from stepscope.fix.saved.pinned_plan import Proof


class PassDiffersError(Exception):
    """The pass is not like the pinned one."""


class NodeChecks:
    """Of one pass, whose first node has the number `first`. Raises PassDiffersError."""

    __slots__ = ("_first", "_like", "_patterns")

    def __init__(self, patterns: dict[int, NodePattern], first: int) -> None:
        self._patterns = patterns
        self._first = first
        self._like: set[int] = set()

    def check_maker(self, tensor: torch.Tensor, number: int) -> None:
        """This node made what lies in the tensor's storage."""
        node = tensor.grad_fn
        while node is not None and node.name() in VIEW_NODES:
            node = node.next_functions[0][0]
        if node is None or node._sequence_nr() - self._first != number:
            raise PassDiffersError(f"another operator than {number} made a saved tensor")
        if number not in self._like:
            self.check_node(node, number)

    def check_node(self, node: Any, number: int) -> None:
        """It and all before it, down to what is held, are as they were pinned."""
        patterns, like, first = self._patterns, self._like, self._first
        waiting = [(node, number)]
        while waiting:
            node, number = waiting.pop()
            pattern = patterns.get(number)
            if pattern is None or number in like:  # None: of a value that is held
                continue
            following = node.next_functions
            if not pattern.is_like(node) or len(following) != len(pattern.edges):
                raise PassDiffersError(
                    f"node {number} is {node.name()}, {pattern.name} was recorded"
                )
            for (before, output), edge in zip(following, pattern.edges, strict=True):
                if before is None:
                    if edge.made is not None or edge.parameter is not None:
                        raise PassDiffersError(f"node {number} has another input")
                elif edge.made is not None:
                    if before._sequence_nr() - first != edge.made or output != edge.output:
                        raise PassDiffersError(f"node {number} has another input")
                    if edge.made in patterns:
                        waiting.append((before, edge.made))
                elif edge.parameter is None:
                    raise PassDiffersError(f"node {number} has another input")
                elif getattr(before, "variable", None) is not edge.parameter:
                    raise PassDiffersError(f"node {number} has another parameter")
            like.add(number)

    def check_kind(self, node: Any, number: int, saved: int) -> None:
        """The node that saved tensor `saved` belongs to; what is before it does not matter."""
        if not self._patterns[number].is_like(node):
            raise PassDiffersError(f"saved tensor {saved} is made by {node.name()}")

    def proven_node(self, start: Any, proof: Proof) -> Any:
        """Follow the proof's edges."""
        node = start
        for place in proof.path:
            edges = () if node is None else node.next_functions
            node = edges[place][0] if place < len(edges) else None
        if node is None or node._sequence_nr() - self._first != proof.node:
            raise PassDiffersError(f"node {proof.node} was not met again")
        pattern = self._patterns[proof.node]
        if not pattern.is_like(node):
            raise PassDiffersError(f"node {proof.node} is {node.name()}, not {pattern.name}")
        return node
