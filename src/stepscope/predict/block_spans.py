"""Where the model's blocks lie in the traced step, and how far a checkpoint runs each again.

Capture wrote the autograd graph with the module of every node. The trace shows which operator of
forward created each node of backward. Both lists have the same order, so every operator gets its
module.

`torch.utils.checkpoint` stops running a block again once it has everything that backward needs: an
operator at the block's end whose inputs are kept, but not its result, does not run.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.predict.buckets import step_window
from stepscope.predict.peak_memory.autocast_widths import is_result
from stepscope.predict.peak_memory.graph_blocks import OUTSIDE, block_of_nodes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.arrays import Int64s
    from stepscope.explain.replay.graph import Flags, Ints
    from stepscope.predict.step_context import StepContext
    from stepscope.records.backward_graph import CapturedBackward, GraphNode

_ENGINE = "autograd::engine::"


class BlockSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a block in forward, on the trace's clock."""

    start_ns: int
    end_ns: int
    stop_ns: int  # where running it again stops

    def runs_again(self, starts_ns: Int64s) -> Flags:
        again: Flags = (starts_ns >= self.start_ns) & (starts_ns < self.stop_ns)
        return again

    def holds(self, starts_ns: Int64s) -> Flags:
        inside: Flags = (starts_ns >= self.start_ns) & (starts_ns < self.end_ns)
        return inside


def find_block_spans(context: StepContext) -> list[BlockSpan]:
    """In order; empty if the run has no graph, or its graph and the trace differ."""
    captured = context.analysis.inputs.memory.captured
    graph = captured.graph if captured is not None else None
    if graph is None or graph.hidden or not graph.nodes:
        return []
    nodes, block = _without_leaves(graph)
    rows = _creators(context, nodes)
    spans = []
    for number, run in groupby(range(len(rows)), key=lambda at: block[at % len(nodes)]):
        places = list(run)
        if number != OUTSIDE:
            own = [nodes[at % len(nodes)] for at in places]
            spans.append(_span(context, own, rows[places]))
    return spans


def _without_leaves(graph: CapturedBackward) -> tuple[list[GraphNode], list[int]]:
    """The nodes that operators of forward created, and the block of each."""
    pairs = zip(graph.nodes, block_of_nodes(graph), strict=True)
    created = [(node, number) for node, number in pairs if not node.is_leaf]
    return [node for node, _ in created], [number for _, number in created]


def _creators(context: StepContext, nodes: Sequence[GraphNode]) -> Ints:
    """The operator of forward behind each node, once for every pass of the step; empty if the names
    differ."""
    host, strings = context.trace.host, context.trace.strings
    begin, end = step_window(context)
    inside = (host.forward_of >= 0) & (host.start_ns >= begin) & (host.start_ns < end)
    backward = np.array(
        [row for row in np.flatnonzero(inside).tolist() if _is_node(strings[host.name[row]])], int
    )
    backward = backward[np.argsort(host.forward_of[backward], kind="stable")]
    names = [strings[code] for code in host.name[backward].tolist()]
    passes = len(names) // max(1, len(nodes))
    is_same = names == [node.name for node in nodes] * passes
    rows: Ints = host.forward_of[backward if is_same else backward[:0]].astype(np.int32)
    return rows


def _is_node(name: str) -> bool:
    """The engine's own event around a node has the same creator."""
    return not name.startswith(_ENGINE)


def _span(context: StepContext, nodes: Sequence[GraphNode], rows: Ints) -> BlockSpan:
    host = context.trace.host
    starts, ends = host.start_ns[rows], host.start_ns[rows] + host.dur_ns[rows]
    keeping = [at for at, node in enumerate(nodes) if node.saved]
    stop = int(starts[0])
    if keeping:
        last = keeping[-1]
        ran = any(is_result(saved.field) for saved in nodes[last].saved)
        stop = int(ends[last] if ran else starts[last])
    return BlockSpan(start_ns=int(starts[0]), end_ns=int(ends.max()), stop_ns=stop)
