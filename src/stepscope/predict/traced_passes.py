"""What a trace says about the memory of forward and backward, and their graph does not."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.work import rows_named
from stepscope.predict.block_spans import captured_graph, created_nodes
from stepscope.predict.buckets import step_window
from stepscope.predict.by_text import is_channels_last, tensor_shapes
from stepscope.predict.peak_memory.convolution_buffers import is_convolution
from stepscope.predict.peak_memory.convolution_layout import ConvolutionLayout
from stepscope.predict.peak_memory.graph_levels import TracedPasses
from stepscope.predict.traced_mode import convolves_in_fp32
from stepscope.records.trace import HostKind

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Ints
    from stepscope.predict.step_context import StepContext
    from stepscope.records.backward_graph import CapturedBackward, GraphNode

_STRIDE, _TRANSPOSED, _GROUPS = 3, 6, 8  # arguments of aten::convolution
_RANKS = (3, 4)  # over one dimension or two
_CONVOLUTION = "aten::convolution"
_ZERO_GRAD = re.compile(r"Optimizer\.zero_grad#")


def find_traced_passes(context: StepContext) -> TracedPasses:
    graph = captured_graph(context)
    if context.on_host or graph is None:
        return TracedPasses()
    places, rows = created_nodes(context)
    in_fp32 = convolves_in_fp32(context)
    convolves = any(is_convolution(node.name) for node in graph.nodes)
    return TracedPasses(
        cleared_late=_clears_after_forward(context, rows),
        convolves_in_fp32=in_fp32 and convolves,
        fp32_convolutions=_find_convolutions(context, places, rows) if in_fp32 else (),
    )


def _clears_after_forward(context: StepContext, forward: Ints) -> bool:
    """Whether gradients of the step before are cleared between forward and backward. `forward` are
    the operators of forward that created nodes."""
    host = context.trace.host
    begin, end = step_window(context)
    inside = (host.start_ns >= begin) & (host.start_ns < end)
    marks = rows_named(
        context.trace, host, inside & (host.kind <= HostKind.ANNOTATION), _ZERO_GRAD.match
    )
    nodes = inside & (host.forward_of >= 0)
    if not len(forward) or not marks.any() or not nodes.any():
        return False
    cleared = host.start_ns[marks]
    after = cleared > np.median(host.start_ns[forward])
    return bool((after & (cleared < host.start_ns[nodes].min())).any())


def _find_convolutions(
    context: StepContext, places: Ints, rows: Ints
) -> tuple[ConvolutionLayout, ...]:
    """Dense ones with filters of several taps, whose input is not in channels_last order. A filter
    of one tap is a plain product, in any layout."""
    graph = captured_graph(context)
    host, strings = context.trace.host, context.trace.strings
    if graph is not None and not len(rows):
        places, rows = _match_by_size(context, graph)
    found: dict[int, ConvolutionLayout] = {}
    for place, row in zip(places.tolist(), rows.tolist(), strict=True):
        if graph is None or not is_convolution(graph.nodes[place].name) or host.shapes[row] < 0:
            continue
        if host.strides[row] >= 0 and is_channels_last(strings[host.strides[row]]):
            continue
        concrete = strings[host.concrete[row]] if host.concrete[row] >= 0 else ""
        layout = _read_layout(place, strings[host.shapes[row]], concrete)
        if layout is not None:
            found[place] = layout
    return tuple(found.values())


def _match_by_size(context: StepContext, graph: CapturedBackward) -> tuple[Ints, Ints]:
    """Convolutions of the graph, and a call with an input and a weight of as many elements each.

    A step that differentiates twice, or trains two models, has other nodes in the trace than in the
    graph, so that their order does not match them.
    """
    host, strings = context.trace.host, context.trace.strings
    begin, end = step_window(context)
    inside = (host.start_ns >= begin) & (host.start_ns < end) & (host.shapes >= 0)
    calls = np.flatnonzero(rows_named(context.trace, host, inside, _CONVOLUTION.__eq__))
    by_size: dict[tuple[int, ...], int] = {}
    for row in calls.tolist():
        shapes = tensor_shapes(strings[host.shapes[row]])[:2]
        by_size.setdefault(tuple(map(math.prod, shapes)), row)
    pairs = [
        (place, by_size[size])
        for place, node in enumerate(graph.nodes)
        if is_convolution(node.name) and (size := _kept_elements(node)) in by_size
    ]
    places, rows = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(places, np.int32), np.array(rows, np.int32)


def _kept_elements(node: GraphNode) -> tuple[int, ...]:
    elements = {saved.field: saved.elements for saved in node.saved}
    return tuple(elements.get(field, 0) for field in ("input", "weight"))


def _read_layout(place: int, shapes: str, concrete: str) -> ConvolutionLayout | None:
    """By the input and the weight: all channels meet, over several points."""
    tensors = [shape for shape in tensor_shapes(shapes) if len(shape) in _RANKS]
    given = msgspec.json.decode(concrete) if concrete else []
    if len(tensors) < 2 or len(given) <= _GROUPS or given[_GROUPS] != "1":
        return None
    (_, inputs, *_), weight = tensors[:2]
    outputs = weight[1] if given[_TRANSPOSED] == "True" else weight[0]
    if all(taps == 1 for taps in weight[2:]):
        return None
    strided = set(msgspec.json.decode(given[_STRIDE] or "[1]")) != {1}
    return ConvolutionLayout(place=place, inputs=inputs, outputs=outputs, strided=strided)
