"""A backward graph in which attention of single operators is one fused node.

Fused attention keeps query, key, value and its result, and a sum for each row of scores; the scores
themselves are computed again in backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.records.backward_graph import GraphNode, GraphOutput, GraphSaved, GraphStorage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.backward_graph import CapturedBackward, GraphEdge

_NAME = "ScaledDotProductFlashAttentionBackward0"
_FIELDS = ("query", "key", "value")
_FLOAT, _FLOAT_BYTES = "float32", 4


def with_fused_attention(
    graph: CapturedBackward, calls: Sequence[Sequence[int]]
) -> CapturedBackward:
    """`calls` are the nodes of each attention, in forward's order; the last one becomes the fused
    node, and the others are left without work."""
    nodes, storages = list(graph.nodes), list(graph.storages)
    for call in calls:
        inputs = _given(graph, call)
        if len(inputs) != len(_FIELDS):
            continue
        result = graph.nodes[call[-1]].outputs
        for place in call:
            nodes[place] = replace(nodes[place], inputs=[], saved=[], outputs=[])
        saved = []
        made = [graph.nodes[edge.node].outputs[edge.output] for edge in inputs]
        for field, value in zip((*_FIELDS, "result"), (*made, result[0]), strict=True):
            saved.append(_keep(storages, field, value))
        nodes[call[-1]] = GraphNode(
            name=_NAME,
            module=graph.nodes[call[-1]].module,
            outputs=result,
            inputs=inputs,
            saved=saved,
        )
    return replace(graph, nodes=nodes, storages=storages)


def _given(graph: CapturedBackward, call: Sequence[int]) -> list[GraphEdge]:
    """What comes into it from outside: the query, then the key and the value."""
    own = set(call)
    edges = [edge for place in call for edge in graph.nodes[place].inputs]
    outside = [edge for edge in edges if edge.node >= 0 and edge.node not in own]
    return list({(edge.node, edge.output): edge for edge in outside}.values())


def _keep(storages: list[GraphStorage], field: str, value: GraphOutput) -> GraphSaved:
    storages.append(GraphStorage(size_bytes=value.elements * _FLOAT_BYTES, kind="activation"))
    return GraphSaved(field=field, storage=len(storages) - 1, elements=value.elements, dtype=_FLOAT)
