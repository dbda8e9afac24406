"""How wide the inputs of a step's calls would be under autocast, by the captured backward graph.

The graph's edges say which result an operator reads. Inputs that need no gradient have no edge.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from stepscope.predict.asked_for_fp32 import find_wide_reads
from stepscope.predict.block_spans import captured_graph, created_nodes
from stepscope.predict.peak_memory.autocast_widths import autocast_rules, autocast_widths

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.explain.replay.graph import Ints
    from stepscope.predict.step_context import StepContext

    Value = tuple[int, int]  # elements, and bytes of each

_FLOAT = "float"


def values_read(
    context: StepContext, outermost: Callable[[Ints], Ints]
) -> dict[int, tuple[Value, ...]]:
    """By the row of each outermost operator: what it reads from others, in the order of edges."""
    graph = captured_graph(context)
    places, rows = created_nodes(context)
    if graph is None or context.on_host or not len(rows):
        return {}
    widths = autocast_widths(graph, autocast_rules(graph, "cuda"), find_wide_reads(context))
    calls = outermost(rows).tolist()
    found: dict[int, list[Value]] = {}
    latest: dict[int, int] = {}  # the call that made each node, in this pass
    for place, call in zip(places.tolist(), calls, strict=True):
        latest[place] = call
        read = found.setdefault(call, [])
        for edge in graph.nodes[place].inputs:
            if edge.node < 0 or latest.get(edge.node, call) == call:
                continue  # a parameter, or a step inside the same call
            read.append((graph.nodes[edge.node].outputs[edge.output].elements,
                         widths[edge.node][edge.output]))  # fmt: skip
    return {call: tuple(values) for call, values in found.items()}


def widths_by_argument(
    shapes: Sequence[Any], dtypes: Sequence[str], values: Sequence[Value]
) -> tuple[int, ...]:
    """Of each fp32 argument, by its number of elements; 0 where no value fits. Of equal sizes the
    later argument takes the later value."""
    left = list(values)
    widths = []
    for shape, dtype in reversed(list(zip(shapes, dtypes, strict=False))):
        elements = math.prod(shape) if dtype == _FLOAT else -1
        at = next((at for at in reversed(range(len(left))) if left[at][0] == elements), None)
        widths.append(0 if at is None else left.pop(at)[1])
    return tuple(reversed(widths))
