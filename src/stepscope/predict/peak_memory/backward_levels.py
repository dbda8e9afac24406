"""Bytes through a backward pass, node by node, as autograd runs them: the latest node first.

A node holds the gradients of its results and what it kept while it computes the gradients of its
inputs. Views and sums hand on the gradient that they received. A parameter takes over its gradient
if nobody else holds it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from stepscope.predict.peak_memory.autocast_widths import (
    FULL,
    NARROW,
    VIEWS,
    AutocastRule,
    operator_of,
)
from stepscope.predict.peak_memory.backward_temporaries import (
    before_gradient_bytes,
    beside_gradient_bytes,
)
from stepscope.predict.peak_memory.convolution_buffers import layout_copies_bytes
from stepscope.predict.peak_memory.graph_blocks import OUTSIDE
from stepscope.predict.peak_memory.held_values import is_of_parameter
from stepscope.predict.peak_memory.node_level import NodeLevel, level_at

if TYPE_CHECKING:
    from stepscope.predict.peak_memory.held_values import HeldGraph, HeldValue
    from stepscope.records.backward_graph import GraphEdge, GraphNode

_HANDS_ON = VIEWS - {"slice", "select", "split", "splitwithsizes", "unbind", "unsafesplit", "chunk"}
_SUMS = ("add", "sub", "addcmul")
# Their gradients are as large and as wide as the result, until they are summed over what was
# broadcast and cast to their input's dtype.
_ELEMENTWISE_PRODUCTS = ("mul", "div")


class BackwardLevels(msgspec.Struct, frozen=True, kw_only=True):
    """Without parameters, optimizer state and all else that is there in every step."""

    kept_bytes: float  # when backward begins
    peak_bytes: float  # the highest level of backward
    gradients_bytes: float  # of the parameters, afterwards
    nodes: tuple[NodeLevel, ...] = ()  # in the order in which they run

    def at(self, place: int) -> float:
        """The highest level while a node runs; 0 for a node that does not."""
        return level_at(self.nodes, place)


class _Gradient:
    """One tensor that may be waiting at several nodes."""

    __slots__ = ("places", "size_bytes")

    def __init__(self, size_bytes: float) -> None:
        self.size_bytes = size_bytes
        self.places = 0


def replay_backward(held: HeldGraph, *, keeps_gradients: bool) -> BackwardLevels:
    """`keeps_gradients`: gradients are there before, and backward adds to them in place."""
    return _Backward(held, keeps_gradients=keeps_gradients).run()


class _Backward:
    def __init__(self, held: HeldGraph, *, keeps_gradients: bool) -> None:
        self.held, self.graph = held, held.graph
        self.keeps_gradients = keeps_gradients
        self.level = self.peak = self.kept = held.kept_bytes
        self.gradients = 0.0
        self.waiting: dict[tuple[int, int], _Gradient] = {}
        self.holders = [len(set(value.holders)) for value in held.values]
        self.kept_by: dict[int, list[int]] = defaultdict(list)
        self.of_block: dict[int, list[int]] = defaultdict(list)
        for number, value in enumerate(held.values):
            for holder in set(value.holders):
                self.kept_by[holder].append(number)
            if held.is_recomputed(value):
                self.of_block[held.block[value.holders[0]]].append(number)

    def run(self) -> BackwardLevels:
        kept, peak = self.level, self.level
        begun: set[int] = set()
        nodes = []
        for place in reversed(range(len(self.graph.nodes))):
            node = self.graph.nodes[place]
            if node.is_leaf:
                continue
            block = self.held.block[place]
            self.peak, left = self.level, self.kept
            if block != OUTSIDE and block not in begun:
                begun.add(block)
                values = (self.held.values[number] for number in self.of_block[block])
                self._rise(sum(map(self.held.bytes_of, values)))
            self._run_node(place, node)
            peak = max(peak, self.peak)
            nodes.append(
                NodeLevel(
                    place=place,
                    peak_bytes=self.peak,
                    kept_bytes=left,
                    gradients_bytes=self.gradients,
                )
            )
        return BackwardLevels(
            kept_bytes=kept,
            peak_bytes=peak,
            gradients_bytes=self.gradients,
            nodes=tuple(nodes),
        )

    def _rise(self, size_bytes: float) -> None:
        self.level += size_bytes
        self.peak = max(self.peak, self.level)

    def _run_node(self, place: int, node: GraphNode) -> None:
        received = [self.waiting.pop((place, number), None) for number in range(len(node.outputs))]
        if not any(received):  # the root: its gradient is a number
            received = [self._new(0.0)]
        self.peak = max(self.peak, self.level + before_gradient_bytes(self.held, place))
        handed = [
            (edge, *self._gradient_for(edge, (place, number), received))
            for number, edge in enumerate(node.inputs)
            if edge.node >= 0 and edge.output < len(self.graph.nodes[edge.node].outputs)
        ]
        for _, gradient, _ in handed:
            gradient.places += 1
        copies = layout_copies_bytes(self.held, place, backward=True)
        beside = beside_gradient_bytes(self.held, place)
        self.peak = max(self.peak, self.level + copies + beside)
        for arrived in received:
            self._release(arrived)
        for number in self.kept_by[place]:
            self._let_go(self.held.values[number], number)
        for edge, gradient, cast_bytes in handed:
            self._hand_on(edge, self._cast(gradient, cast_bytes))

    def _gradient_for(
        self, edge: GraphEdge, read: tuple[int, int], received: list[_Gradient | None]
    ) -> tuple[_Gradient, float]:
        """The gradient of one input as the node computes it, and its size once it is cast to the
        input's dtype. `read` is the node and the number of the input."""
        place = read[0]
        size = self._bytes(edge)
        operator = operator_of(self.graph.nodes[place].name)
        first = next((gradient for gradient in received if gradient), None)
        hands_on = operator in _HANDS_ON or operator in _SUMS
        if hands_on and first and abs(first.size_bytes - size) < 1:
            return first, size
        if first and operator in _ELEMENTWISE_PRODUCTS:
            return self._new(max(first.size_bytes, size)), size
        width = self.held.widths[edge.node][edge.output]
        computed = {AutocastRule.NARROW: NARROW, AutocastRule.FULL: FULL}.get(
            self.held.rules[place] if self.held.rules else AutocastRule.WIDEST, width
        )
        if read in self.held.change.wide_reads:
            computed = FULL
        is_cast = self.graph.nodes[edge.node].outputs[edge.output].dtype == "float32"
        return self._new(size * computed / width if is_cast else size), size

    def _cast(self, gradient: _Gradient, size_bytes: float) -> _Gradient:
        if abs(gradient.size_bytes - size_bytes) < 1:
            return gradient
        cast = self._new(size_bytes)
        cast.places = 1
        self._release(gradient)
        return cast

    def _bytes(self, edge: GraphEdge) -> float:
        target = self.graph.nodes[edge.node]
        elements = target.outputs[edge.output].elements
        grows = 1.0 if is_of_parameter(self.graph, edge.node) else self.held.change.batch
        return elements * self.held.widths[edge.node][edge.output] * grows

    def _new(self, size_bytes: float) -> _Gradient:
        gradient = _Gradient(size_bytes)
        gradient.places = 0
        self._rise(size_bytes)
        return gradient

    def _hand_on(self, edge: GraphEdge, gradient: _Gradient) -> None:
        key = edge.node, edge.output
        before = self.waiting.get(key)
        if before is None:
            self.waiting[key] = gradient
            if self.graph.nodes[edge.node].is_leaf:
                self._accumulate(gradient)
            return
        if before.places > 1:  # somebody else needs it as it is
            total = self._new(before.size_bytes)
            total.places = 1
            self._release(before)
            self.waiting[key] = total
        self._release(gradient)

    def _accumulate(self, gradient: _Gradient) -> None:
        if self.keeps_gradients:
            self._release(gradient)
            return
        self.gradients += gradient.size_bytes
        if gradient.places > 1:
            self._rise(gradient.size_bytes)

    def _release(self, gradient: _Gradient | None) -> None:
        if gradient is None:
            return
        gradient.places -= 1
        if gradient.places <= 0:
            self.level -= gradient.size_bytes
            gradient.size_bytes = 0.0

    def _let_go(self, value: HeldValue, number: int) -> None:
        self.holders[number] -= 1
        if not self.holders[number]:
            size = self.held.bytes_of(value)
            self.level -= size
            self.kept -= 0.0 if self.held.is_recomputed(value) else size
