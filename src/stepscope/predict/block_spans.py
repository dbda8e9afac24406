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
from msgspec.structs import replace

from stepscope.explain.work import rows_named
from stepscope.predict.buckets import step_window
from stepscope.predict.peak_memory.autocast_widths import is_result
from stepscope.predict.peak_memory.graph_blocks import OUTSIDE, block_of_nodes
from stepscope.predict.peak_memory.held_values import is_of_parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.arrays import Int64s
    from stepscope.explain.replay.graph import Flags, Ints
    from stepscope.predict.step_context import StepContext
    from stepscope.records.backward_graph import CapturedBackward, GraphNode

_ENGINE = "autograd::engine::"
# A change of a view in place: the trace has the name of the operator's own node inside.
_IN_PLACE = "torch::autograd::CopySlices"
_REMADE_VIEW = "AsStridedBackward0"


class BlockSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a block in forward, on the trace's clock."""

    start_ns: int
    end_ns: int
    stop_ns: int  # where running it again stops
    kept: int = 0  # tensors that its nodes keep for backward

    def runs_again(self, starts_ns: Int64s) -> Flags:
        again: Flags = (starts_ns >= self.start_ns) & (starts_ns < self.stop_ns)
        return again

    def holds(self, starts_ns: Int64s) -> Flags:
        inside: Flags = (starts_ns >= self.start_ns) & (starts_ns < self.end_ns)
        return inside


def find_block_spans(context: StepContext) -> list[BlockSpan]:
    """In order; empty if the run has no graph, or its graph and the trace differ."""
    graph = captured_graph(context)
    places, rows = created_nodes(context)
    if graph is None or not len(rows):
        return []
    block = block_of_nodes(graph)
    spans = []
    for number, run in groupby(range(len(rows)), key=lambda at: block[places[at]]):
        if number != OUTSIDE:
            own = list(run)
            span = _span(context, [graph.nodes[at] for at in places[own]], rows[own])
            if _reads_no_gradient(graph, places[own].tolist()):
                span = replace(span, start_ns=_end_before(context, rows, own[0]))
            spans.append(span)
    return spans


def _reads_no_gradient(graph: CapturedBackward, places: Sequence[int]) -> bool:
    """Whether a block begins with values that need no gradient: operators that made them inside
    the block have no nodes."""
    first = next((at for at in places if not is_of_parameter(graph, at)), None)
    read = [edge.node for edge in graph.nodes[first].inputs] if first is not None else []
    older = [at for at in read if at < 0]
    return bool(older) and all(is_of_parameter(graph, at) for at in read if at >= 0)


def _end_before(context: StepContext, rows: Ints, at: int) -> int:
    """Where the operator before ends, or the step begins."""
    host = context.trace.host
    if at == 0:
        return step_window(context)[0]
    return int(host.start_ns[rows[at - 1]] + host.dur_ns[rows[at - 1]])


def created_nodes(context: StepContext) -> tuple[Ints, Ints]:
    """Nodes of the captured graph, and the operator of forward that created each, in order; once
    for every pass of the step. Empty without a graph, or if the trace has other nodes."""
    graph = captured_graph(context)
    nodes = graph.nodes if graph is not None else []
    places = [at for at, node in enumerate(nodes) if not node.is_leaf]
    backward = _traced_nodes(context) if places else np.zeros(0, np.int32)
    host, strings = context.trace.host, context.trace.strings
    names = [strings[code] for code in host.name[backward].tolist()]
    remade = _remade_views(nodes)
    for listed in (places, [at for at in places if at not in remade]):
        repeated = listed * (len(names) // max(1, len(listed)))
        if len(repeated) == len(names) and all(
            nodes[at].name in (name, _IN_PLACE) for at, name in zip(repeated, names, strict=True)
        ):
            return np.array(repeated, np.int32), host.forward_of[backward].astype(np.int32)
    return np.zeros(0, np.int32), np.zeros(0, np.int32)


def _remade_views(nodes: Sequence[GraphNode]) -> set[int]:
    """Views that autograd made again because they were changed in place. No operator created them,
    so most traces do not link them to one."""
    return {
        at
        for at, node in enumerate(nodes)
        if node.name == _REMADE_VIEW
        and any(edge.node >= 0 and nodes[edge.node].name == _IN_PLACE for edge in node.inputs)
    }


def captured_graph(context: StepContext) -> CapturedBackward | None:
    """None without one, or if the script's own hooks hide a part of it."""
    captured = context.analysis.inputs.memory.captured
    graph = captured.graph if captured is not None else None
    return None if graph is None or graph.hidden else graph


def _traced_nodes(context: StepContext) -> Ints:
    """Events of the step's backward, in the order in which forward created their nodes."""
    host = context.trace.host
    begin, end = step_window(context)
    inside = (host.forward_of >= 0) & (host.start_ns >= begin) & (host.start_ns < end)
    # The engine's own event around a node has the same creator.
    rows = np.flatnonzero(
        rows_named(context.trace, host, inside, lambda name: not name.startswith(_ENGINE))
    ).astype(np.int32)
    ordered: Ints = rows[np.argsort(host.forward_of[rows], kind="stable")]
    return ordered


def _span(context: StepContext, nodes: Sequence[GraphNode], rows: Ints) -> BlockSpan:
    host = context.trace.host
    starts, ends = host.start_ns[rows], host.start_ns[rows] + host.dur_ns[rows]
    keeping = [at for at, node in enumerate(nodes) if node.saved]
    stop = int(starts[0])
    if keeping:
        last = keeping[-1]
        ran = any(is_result(saved.field) for saved in nodes[last].saved)
        stop = int(ends[last] if ran else starts[last])
    kept = sum(len(node.saved) for node in nodes)
    return BlockSpan(start_ns=int(starts[0]), end_ns=int(ends.max()), stop_ns=stop, kept=kept)
