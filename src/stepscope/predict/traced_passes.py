"""What a trace says about the memory of forward and backward, and their graph does not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.work import rows_named
from stepscope.predict.block_spans import captured_graph, created_nodes
from stepscope.predict.buckets import step_window
from stepscope.predict.by_text import is_channels_last, tensor_shapes
from stepscope.predict.peak_memory.convolution_buffers import is_convolution
from stepscope.predict.peak_memory.graph_levels import TracedPasses
from stepscope.predict.traced_mode import find_autocast, may_convolve_in_tf32
from stepscope.records.trace import HostKind

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Ints
    from stepscope.predict.step_context import StepContext

_RANKS = (3, 4)  # over one dimension or two
_ZERO_GRAD = re.compile(r"Optimizer\.zero_grad#")


def find_traced_passes(context: StepContext) -> TracedPasses:
    places, rows = created_nodes(context)
    if context.on_host or not len(rows):
        return TracedPasses()
    on_tensor_cores = may_convolve_in_tf32(context) or bool(find_autocast(context.trace))
    return TracedPasses(
        cleared_late=_clears_after_forward(context, rows),
        fp32_convolutions=(
            frozenset() if on_tensor_cores else _find_convolutions(context, places, rows)
        ),
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
    if not marks.any() or not nodes.any():
        return False
    cleared = host.start_ns[marks]
    after = cleared > np.median(host.start_ns[forward])
    return bool((after & (cleared < host.start_ns[nodes].min())).any())


def _find_convolutions(context: StepContext, places: Ints, rows: Ints) -> frozenset[int]:
    """Nodes of dense convolutions with filters of several taps, whose input is not in channels_last
    order. A filter of one tap is a plain product, in any layout."""
    graph = captured_graph(context)
    host, strings = context.trace.host, context.trace.strings
    found = set()
    for place, row in zip(places.tolist(), rows.tolist(), strict=True):
        if graph is None or not is_convolution(graph.nodes[place].name) or host.shapes[row] < 0:
            continue
        last = host.strides[row] >= 0 and is_channels_last(strings[host.strides[row]])
        if not last and _is_dense(strings[host.shapes[row]]):
            found.add(place)
    return frozenset(found)


def _is_dense(shapes: str) -> bool:
    """By the input and the weight: all channels meet, over several points."""
    tensors = [shape for shape in tensor_shapes(shapes) if len(shape) in _RANKS]
    if len(tensors) < 2:
        return False
    given, weight = tensors[:2]
    meets = given[1] in weight[:2]
    return meets and any(taps > 1 for taps in weight[2:])
