"""Bytes through a forward pass, node by node, from its backward graph.

What backward needs stays. Any other result goes once the last operator that reads it has run; those
that were joined (torch.cat) stand in a list of the module that joins them, so they stay until that
module returns. A cast copy is made beside the value it copies, and so is one in another layout.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from stepscope.predict.peak_memory.autocast_widths import FULL, VIEWS, is_result, operator_of
from stepscope.predict.peak_memory.convolution_buffers import layout_copies_bytes
from stepscope.predict.peak_memory.held_values import UNKNOWN, is_of_parameter, maker_of
from stepscope.predict.peak_memory.node_level import NodeLevel

if TYPE_CHECKING:
    from stepscope.predict.peak_memory.held_values import HeldGraph
    from stepscope.records.backward_graph import CapturedBackward, GraphModule

_JOIN = "cat"


def replay_forward(held: HeldGraph) -> tuple[NodeLevel, ...]:
    """Nodes in the order in which they run."""
    graph = held.graph
    stays: dict[int, float] = defaultdict(float)  # from this node on
    passing: dict[int, float] = defaultdict(float)  # while this node runs
    kept: set[int] = set()
    for value in held.values:
        size = held.bytes_of(value)
        first = min(value.holders)
        if held.is_recomputed(value):
            passing[first] += size if value.is_copy else 0.0
        elif value.is_copy or value.producer == UNKNOWN:
            stays[first] += size
        else:
            stays[value.producer] += size
            kept.add(value.producer)
    last, listed = _last_reads(graph)
    goes: dict[int, float] = defaultdict(float)  # after this node
    may_go: dict[int, float] = defaultdict(float)  # after this node, if no list holds it
    nodes = []
    level = kept_bytes = joined = 0.0
    for place, node in enumerate(graph.nodes):
        if node.is_leaf:
            continue
        level += stays[place]
        kept_bytes += stays[place]
        if place not in kept and operator_of(node.name) not in VIEWS:
            size = _result_bytes(held, place)
            level += size
            read = last.get(place, place)
            goes[max(read, listed.get(place, place))] += size
            may_go[read] += size
        beside = passing[place] + _wide_copies_bytes(held, place)
        peak = level + beside + layout_copies_bytes(held, place, backward=False)
        nodes.append(
            NodeLevel(place=place, peak_bytes=peak, kept_bytes=kept_bytes, joined_bytes=joined)
        )
        level -= goes[place]
        joined += may_go[place] - goes[place]
    return tuple(nodes)


def _wide_copies_bytes(held: HeldGraph, place: int) -> float:
    """What the script casts to fp32 for a node, beside the narrow values. What the node keeps is
    counted as such."""
    graph, node = held.graph, held.graph.nodes[place]
    kept = {saved.elements for saved in node.saved if not is_result(saved.field)}
    size = 0.0
    for number, edge in enumerate(node.inputs):
        if (place, number) not in held.change.wide_reads or edge.node < 0:
            continue
        elements = graph.nodes[edge.node].outputs[edge.output].elements
        if held.widths[edge.node][edge.output] < FULL and elements not in kept:
            size += elements * FULL * held.change.batch
    return size


def _result_bytes(held: HeldGraph, place: int) -> float:
    outputs, widths = held.graph.nodes[place].outputs, held.widths[place]
    size = sum(out.elements * width for out, width in zip(outputs, widths, strict=True))
    return size * (1.0 if is_of_parameter(held.graph, place) else held.change.batch)


def _last_reads(graph: CapturedBackward) -> tuple[dict[int, int], dict[int, int]]:
    """The node that reads each node's result last, and the node until which a list holds it."""
    last: dict[int, int] = {}
    listed: dict[int, int] = {}
    for place, node in enumerate(graph.nodes):
        end = _module_end(graph, place) if operator_of(node.name) == _JOIN else 0
        for edge in node.inputs:
            if edge.node < 0 or graph.nodes[edge.node].is_leaf:
                continue
            maker = maker_of(graph, edge.node)
            last[maker] = max(last.get(maker, 0), place)
            listed[maker] = max(listed.get(maker, 0), end)
    return last, listed


def _module_end(graph: CapturedBackward, place: int) -> int:
    """The last node before the module that called this one returns."""
    own = graph.nodes[place].module
    if own < 0:
        return place
    for later in range(place + 1, len(graph.nodes)):
        module = graph.nodes[later].module
        if module < 0 or not _is_inside(graph.modules[module], graph.modules[own]):
            return later - 1
    return len(graph.nodes) - 1


def _is_inside(inner: GraphModule, outer: GraphModule) -> bool:
    """The whole model goes by the name of its type, and everything is inside it."""
    is_model = outer.path in ("", outer.type)
    return is_model or inner.path == outer.path or inner.path.startswith(f"{outer.path}.")
