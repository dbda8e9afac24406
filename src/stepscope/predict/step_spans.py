"""Find spans of the traced step: the model's blocks, work without gradients, host time
inside events, waits for the data loader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.predict.peak_memory.backward_graph import (
    OUTSIDE,
    block_of_nodes,
    is_of_parameter,
    is_result,
)
from stepscope.predict.step_context import StepContext, in_step, step_window
from stepscope.records.memory import CapturedBackward
from stepscope.records.trace import HostKind
from stepscope.step import intervals
from stepscope.step.correct import scale_host
from stepscope.step.graph import Phase, StepGraph
from stepscope.step.replay import step_ns
from stepscope.step.work import DATA_LOADING, rows_named

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.step.arrays import Int64s
    from stepscope.step.graph import Flags, Ints

# Where the model's blocks lie in the traced step, and how far a checkpoint runs each again.
#
# Capture wrote the autograd graph with the module of every node. The trace shows which operator of
# forward created each node of backward. Both lists have the same order, so every operator gets its
# module.
#
# `torch.utils.checkpoint` stops running a block again once it has everything that backward needs:
# an operator at the block's end whose inputs are kept, but not its result, does not run.

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
    host, block = context.trace.host, block_of_nodes(graph)
    starts, ends = host.start_ns[rows], host.start_ns[rows] + host.dur_ns[rows]
    spans = []
    for number, run in groupby(range(len(rows)), key=lambda at: block[places[at]]):
        if number == OUTSIDE:
            continue
        own = list(run)
        nodes = [graph.nodes[at] for at in places[own]]
        start = stop = int(starts[own[0]])
        keeping = [at for at, node in enumerate(nodes) if node.saved]
        if keeping:
            last = keeping[-1]
            ran = any(is_result(saved.field) for saved in nodes[last].saved)
            stop = int((ends if ran else starts)[own[last]])
        if _reads_no_gradient(graph, places[own].tolist()):
            # From where the operator before ends, or the step begins.
            start = int(ends[own[0] - 1]) if own[0] else step_window(context)[0]
        kept = sum(len(node.saved) for node in nodes)
        end = int(ends[own].max())
        spans.append(BlockSpan(start_ns=start, end_ns=end, stop_ns=stop, kept=kept))
    return spans


def _reads_no_gradient(graph: CapturedBackward, places: Sequence[int]) -> bool:
    """Whether a block begins with values that need no gradient: operators that made them inside
    the block have no nodes."""
    first = next((at for at in places if not is_of_parameter(graph, at)), None)
    read = [edge.node for edge in graph.nodes[first].inputs] if first is not None else []
    without = any(at < 0 for at in read)
    return without and all(is_of_parameter(graph, at) for at in read if at >= 0)


def created_nodes(context: StepContext) -> tuple[Ints, Ints]:
    """Nodes of the captured graph, and the operator of forward that created each, in order; once
    for every pass of the step. Empty without a graph, or if the trace has other nodes."""
    graph = captured_graph(context)
    nodes = graph.nodes if graph is not None else []
    places = [at for at, node in enumerate(nodes) if not node.is_leaf]
    if not places:
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    # Events of the step's backward, in the order in which forward created their nodes. The engine's
    # own event around a node has the same creator.
    host, strings = context.trace.host, context.trace.strings
    inside = (host.forward_of >= 0) & in_step(context)
    backward = np.flatnonzero(
        rows_named(context.trace, host, inside, lambda name: not name.startswith(_ENGINE))
    )
    backward = backward[np.argsort(host.forward_of[backward], kind="stable")]
    names = [strings[code] for code in host.name[backward].tolist()]
    # Views that autograd made again because they were changed in place: no operator created them,
    # so most traces do not link them to one.
    remade = {
        at
        for at, node in enumerate(nodes)
        if node.name == _REMADE_VIEW
        and any(edge.node >= 0 and nodes[edge.node].name == _IN_PLACE for edge in node.inputs)
    }
    for listed in (places, [at for at in places if at not in remade]):
        repeated = listed * (len(names) // max(1, len(listed)))
        if len(repeated) == len(names) and all(
            nodes[at].name in (name, _IN_PLACE) for at, name in zip(repeated, names, strict=True)
        ):
            return np.array(repeated, np.int32), host.forward_of[backward].astype(np.int32)
    return np.zeros(0, np.int32), np.zeros(0, np.int32)


def captured_graph(context: StepContext) -> CapturedBackward | None:
    """None without one, or if the script's own hooks hide a part of it."""
    captured = context.analysis.inputs.memory.captured
    graph = captured.graph if captured is not None else None
    return None if graph is None or graph.hidden else graph


# What a step computes without gradients before its training pass: games against itself, a teacher.
#
# Autocast begins with the first call of the model that backward follows, and ends where backward
# begins. Work under `torch.no_grad()` that comes first stays as it is.


def find_before_training(context: StepContext) -> Flags:
    """Tasks of operators without gradients, if no operator that backward follows came before them
    since the last backward pass. None if the trace does not link the two passes."""
    host, rows = context.trace.host, context.operators.row
    linked = np.zeros(len(host), np.bool_)
    linked[host.forward_of[host.forward_of >= 0]] = True
    if not linked.any():
        return np.zeros(len(rows), np.bool_)
    forward = (context.task_phase == Phase.FORWARD) & (rows >= 0)
    at = np.maximum(rows, 0)
    # PyTorch numbers operators for autograd only while gradients are enabled.
    with_gradients = _or_around(host.sequence >= 0, host.parent)[at]
    trains = forward & _or_around(linked, host.parent)[at]
    backward = context.task_phase == Phase.BACKWARD
    since_backward = _last(trains) <= _last(backward)
    found: Flags = forward & ~with_gradients & since_backward
    return found


def _or_around(flags: Flags, parent: NDArray[np.int32]) -> Flags:
    """Whether an event or any event around it has the flag."""
    while True:
        around = flags | np.where(parent >= 0, flags[np.maximum(parent, 0)], False)
        if np.array_equal(around, flags):
            return flags
        flags = around


def _last(flags: Flags) -> NDArray[np.intp]:
    """For each task, the place of the last one up to it that has the flag, or -1."""
    places: NDArray[np.intp] = np.maximum.accumulate(np.where(flags, np.arange(len(flags)), -1))
    return places


# Host time inside some events, taken out of the gaps it lies in.


def shorten_gaps(
    context: StepContext, last: HostKind, matches: Callable[[str], object], factor: float = 0.0
) -> tuple[StepGraph, float, int]:
    """Multiply by `factor` the part of the step's gaps that host events of matching names fill.

    They are of kinds up to `last`; only those in the step that the graph was taken from count. Also
    returns the time saved, in nanoseconds of the step without the profiler, and how many there are.
    """
    host = context.trace.host
    rows = np.flatnonzero(rows_named(context.trace, host, host.kind <= last, matches))
    starts = host.start_ns[rows]
    graph, saved_ns = shorten_spans(context, starts, starts + host.dur_ns[rows], factor)
    return graph, saved_ns, len(rows)


def shorten_spans(
    context: StepContext, starts: Int64s, ends: Int64s, factor: float = 0.0
) -> tuple[StepGraph, float]:
    """Multiply by `factor` the part of the step's gaps that these spans of host time fill."""
    graph, host = context.graph, context.trace.host
    calls = graph.calls
    known = np.flatnonzero(calls.row >= 0)
    if not len(known) or not len(starts):
        return graph, 0.0
    start = host.start_ns[calls.row[known]]
    end = start + host.dur_ns[calls.row[known]]
    gap_start = np.append(step_window(context)[0], end[:-1])
    spans = intervals.union(starts, ends)
    filled = intervals.length_before(spans, start) - intervals.length_before(spans, gap_start)
    share = np.clip(filled / np.maximum(start - gap_start, 1), 0.0, 1.0)
    left = np.ones(len(calls))
    left[known] = 1.0 - share * (1.0 - factor)
    gap_ns = calls.gap_ns * left
    saved_ns = float((calls.gap_ns - gap_ns).sum())
    return replace(graph, calls=replace(calls, gap_ns=gap_ns)), saved_ns


# The training thread's waits for the data loader, taken out of the step.


def without_waits(context: StepContext) -> tuple[StepGraph, float, int]:
    """The typical step without its waits, what that saves, and how many there were.

    A window that recorded a stall shows a longer wait than a typical step has, and a lucky one a
    shorter wait: the run knows it. On a device a longer wait may be hidden behind queued work.
    """
    waits = (HostKind.ANNOTATION, DATA_LOADING.search)
    graph, saved_ns, events = shorten_gaps(context, *waits)
    measured = context.analysis.measured
    typical_ns = measured.data_ns if measured else None
    if typical_ns is not None and saved_ns > typical_ns:
        return shorten_gaps(context, *waits, 1 - typical_ns / saved_ns)
    whole_ns = step_ns(context.graph)
    if typical_ns is not None and graph.on_host and saved_ns < typical_ns < whole_ns:
        rest = scale_host(graph, (whole_ns - typical_ns) / (whole_ns - saved_ns))
        return rest, float(typical_ns), max(1, events)
    return graph, saved_ns, events
