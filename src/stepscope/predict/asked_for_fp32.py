"""Values that the script asks for in fp32, such as `logits.float()`.

In an fp32 step such a call changes nothing and leaves no node in the backward graph, but the trace
has it. Under autocast it makes a wide copy of a narrow value, and what follows is computed in fp32.
A call says how many elements its value has; the value is the newest one of that size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.work import rows_named
from stepscope.predict.block_spans import captured_graph, created_nodes
from stepscope.predict.buckets import step_window
from stepscope.records.trace import HostKind

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Ints
    from stepscope.predict.step_context import StepContext
    from stepscope.records.backward_graph import CapturedBackward

    Reads = frozenset[tuple[int, int]]  # a node, and which of its inputs

_TO, _OPERATORS = "aten::to", "aten::"
_FLOAT, _FLOAT_CODE = "float", "6"  # PyTorch's number of the dtype


def find_wide_reads(context: StepContext) -> Reads:
    """Inputs that nodes of the captured graph read in fp32 because the script asked for it. Empty
    without a graph, or if the trace has other nodes."""
    graph = captured_graph(context)
    places, rows = created_nodes(context)
    if graph is None or not len(rows):
        return frozenset()
    calls = _asking_calls(context)
    reads: set[tuple[int, int]] = set()
    for row, elements in calls:
        made = int(np.searchsorted(rows, row))  # rows are in the order of their starts
        value = _newest(graph, places[:made], elements)
        if value is not None:
            reads |= _reads_of(graph, value, places[made:])
    return frozenset(reads)


def _asking_calls(context: StepContext) -> list[tuple[int, int]]:
    """Rows of the trace, with the elements of their value; not those inside of operators."""
    trace, host = context.trace, context.trace.host
    begin, end = step_window(context)
    inside = (host.kind == HostKind.OPERATOR) & (host.start_ns >= begin) & (host.start_ns < end)
    calls = []
    for row in np.flatnonzero(rows_named(trace, host, inside, _TO.__eq__)).tolist():
        parent = int(host.parent[row])
        by_operator = parent >= 0 and trace.strings[host.name[parent]].startswith(_OPERATORS)
        texts = [int(column[row]) for column in (host.shapes, host.dtypes, host.concrete)]
        if by_operator or min(texts) < 0:
            continue
        shapes, dtypes, concrete = (msgspec.json.decode(trace.strings[code]) for code in texts)
        # The dtype comes first, or after a device.
        asked = next((text for text in concrete[1:3] if text), "")
        if shapes and dtypes[:1] == [_FLOAT] and asked == _FLOAT_CODE:
            calls.append((row, math.prod(shapes[0])))
    return calls


def _newest(graph: CapturedBackward, places: Ints, elements: int) -> tuple[int, int] | None:
    for place in reversed(places.tolist()):
        for number, out in enumerate(graph.nodes[place].outputs):
            if out.elements == elements:
                return place, number
    return None


def _reads_of(graph: CapturedBackward, value: tuple[int, int], places: Ints) -> Reads:
    return frozenset(
        (place, number)
        for place in places.tolist()
        for number, edge in enumerate(graph.nodes[place].inputs)
        if (edge.node, edge.output) == value
    )
