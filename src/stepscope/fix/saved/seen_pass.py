"""What a watched pass showed: by number and by content."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from stepscope.fix.saved.node_patterns import NodePattern, all_nodes

if TYPE_CHECKING:
    from stepscope.fix.saved.encodings import Geometry
    from stepscope.fix.saved.pinned_plan import SourceKey
    from stepscope.fix.saved.pinning import PinningFollower, SeenResult, SeenTensor

_LONGEST_PATH = 8  # edges from a later tensor's node to the one that is to be proven


class NotSettledError(Exception):
    """Nodes do not tell all about a call."""


class SeenPass:
    """What the pass showed, by number and by content."""

    def __init__(self, seen: PinningFollower) -> None:
        self.seen = seen
        self.nodes = all_nodes(seen.roots.values(), seen.first)
        self.patterns = {n: NodePattern.of(node, seen.first) for n, node in self.nodes.items()}
        self._uses_of: defaultdict[Any, list[int]] = defaultdict(list)  # by content and maker
        self._results_of: defaultdict[Any, list[SeenResult]] = defaultdict(list)
        for number, use in enumerate(seen.uses):
            if use.plain:
                self._uses_of[use.tensor.content, use.tensor.maker].append(number)
        for result in seen.results:
            self._results_of[result.tensor.content, result.tensor.maker].append(result)

    def pattern(self, number: int | None) -> NodePattern | None:
        return None if number is None else self.patterns.get(number)

    def source(self, tensor: SeenTensor, node: int) -> tuple[SourceKey, int | SeenResult, Geometry]:
        """Where a kept argument of this node is seen: as a saved tensor, or a module's result."""
        uses = self._uses_of[tensor.content, tensor.maker]
        if tensor.maker is None:
            for number in uses:
                if self.seen.uses[number].nodes_before - 1 == node:
                    geometry = self.seen.uses[number].tensor.geometry
                    return ("use", number), number, geometry
            raise NotSettledError("an input without gradient that its node does not keep")
        if uses:
            return tensor.maker, uses[0], self.seen.uses[uses[0]].tensor.geometry
        for result in self._results_of[tensor.content, tensor.maker]:
            return tensor.maker, result, result.tensor.geometry
        raise NotSettledError("an input that is never seen")

    def path(self, start: Any, target: int) -> tuple[int, ...] | None:
        """The shortest way along edges to the target."""
        level: list[tuple[Any, tuple[int, ...]]] = [(start, ())]
        for _ in range(_LONGEST_PATH):
            following = []
            for node, path in level:
                number = -1 if node is None else node._sequence_nr() - self.seen.first
                if number == target:
                    return path
                if number > target and number in self.nodes:
                    edges = enumerate(node.next_functions)
                    following += [(below, (*path, place)) for place, (below, _) in edges]
            level = following[:64]
        return None
