"""The autograd graph of one backward pass as a table: its nodes, what each keeps, what it hands on.

What another precision, another batch or recomputed blocks would keep can be worked out from it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from stepscope.measure.graph_nodes import LEAF, is_leaf, is_parameter, node_of, saved_by
from stepscope.measure.storages import pieces

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from stepscope.measure.storages import Key

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
                storage = self._storage(piece.key, piece.size_bytes, is_parameter(tensor))
                yield [name, storage, tensor.numel(), _dtype(tensor)]

    def _storage(self, key: Key, size_bytes: int, of_parameter: bool) -> int:
        if key not in self._storages:
            kind = ACTIVATION
            if of_parameter or key in self._states:
                kind = STATE
            elif key in self._inputs:
                kind = INPUT
            self.saved_bytes += size_bytes if kind == ACTIVATION else 0
            self._storages[key] = len(self._rows)
            self._rows.append((size_bytes, kind))
        return self._storages[key]

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
