"""Predict the peak memory of a changed step: another batch, another precision, blocks
recomputed, compiled. This reads the trace; peak_memory/ reads the backward graph only.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.memory.captured import predict_peak
from stepscope.explain.memory.model import (
    find_transformer,
    linear_elements,
    token_bytes,
    transformer_activations,
)
from stepscope.predict.autocast import convolves_in_fp32, find_attention_nodes, find_wide_reads
from stepscope.predict.fitted import fitted
from stepscope.predict.peak_memory.backward_graph import (
    FULL,
    NARROW,
    ConvolutionLayout,
    MemoryChange,
)
from stepscope.predict.peak_memory.passes import GraphLevels, TracedPasses, is_convolution
from stepscope.predict.peak_memory.peak import (
    changed_peak,
    later_peak,
    other_algorithms_peak,
    unsure_workspace,
)
from stepscope.predict.step_context import StepContext, current_form, in_step
from stepscope.predict.step_spans import captured_graph, created_nodes
from stepscope.records.memory import CapturedBackward, GraphNode, Memory
from stepscope.records.normal import median
from stepscope.records.prediction import PeakMemory
from stepscope.records.trace import HostKind
from stepscope.step.call_tree import is_channels_last, tensor_shapes
from stepscope.step.work import rows_named
from stepscope.text import figures

if TYPE_CHECKING:
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.step.graph import Ints

# A run folder's measured memory and its backward graph come first (peak_memory/). Without them, a
# transformer that Adam or SGD trains is worked out by arithmetic. Its peak is where backward
# begins: parameters, optimizer state, everything kept for backward and the loss's gradient, but no
# gradients of parameters yet. With few samples the peak is in the optimizer's step, which holds all
# gradients, and one more copy in its foreach form.

_DOUBT = fitted("doubts.memory_arithmetic")  # of what arithmetic says
_BETWEEN_RUNS = fitted("doubts.memory_between_runs")  # of the peak of an unchanged step
_WORTH_SAYING = 0.03  # of the peak
_MOVED_DOUBT = fitted("doubts.memory_moved")  # of what another batch adds or takes


class PeakParts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes at the peak, by what they depend on."""

    fixed_bytes: int
    blocks_bytes: int  # kept by the blocks for backward
    inputs_bytes: int  # the part of them that goes into each block
    outside_bytes: int  # kept by embedding, head and loss
    optimizer_bytes: int  # the optimizer's own peak

    def peak_bytes(self, kept_bytes: float) -> float:
        return max(self.fixed_bytes + kept_bytes, self.optimizer_bytes)


def peak_at_batch(context: StepContext, factor: float) -> PeakMemory | None:
    """At `factor` times the trace's batch, with the other changes made so far; None if it cannot be
    known."""
    update_bytes = 0  # what the optimizer's form needs during its step, if its rule is known
    if context.parameters is not None and context.rule.fused:
        beside = _bytes_in_step(context) - context.rule.state_bytes - FULL
        update_bytes = beside * context.parameters.elements
    change = replace(context.memory_change, batch=factor, update_bytes=update_bytes)
    memory = context.memory
    if memory is not None and memory.largest_batch is not None:
        known = context.analysis.compute_once(_Known)
        if not change.moves_passes and not change.other_update:
            return _peak_of_batch(memory, known.levels(context), factor)
        levels, change = known.levels(context), known.with_trace(context, change)
        peak = changed_peak(levels, memory, change) if levels else None
        if peak is not None:
            return peak
    return _peak_by_arithmetic(context, change)


class _Known:
    """What many combinations of changes ask for, found once."""

    def __init__(self, analysis: RankAnalysis) -> None:
        self._captured = analysis.inputs.memory.captured
        self._levels: GraphLevels | None = None
        self._casts: dict[str, Any] | None = None

    def levels(self, context: StepContext) -> GraphLevels | None:
        if self._levels is None and self._captured is not None:
            self._levels = GraphLevels(self._captured, find_traced_passes(context))
        return self._levels

    def with_trace(self, context: StepContext, change: MemoryChange) -> MemoryChange:
        """What the trace says about the change and the backward graph does not."""
        levels = self.levels(context)
        if levels is None:
            return change
        if change.autocast or change.tf32:
            change = replace(change, layout_copies=levels.traced.fp32_convolutions)
        if not change.autocast:
            return change
        if self._casts is None:
            self._casts = {
                "fused_attention": find_attention_nodes(context),
                "wide_reads": find_wide_reads(context),
            }
        return replace(change, **self._casts)


def _peak_of_batch(memory: Memory, levels: GraphLevels | None, factor: float) -> PeakMemory:
    size, low, high = predict_peak(memory, factor)
    if levels is None or factor == 1.0:
        later, unsure, other = None, 0.0, 0.0
    else:
        later, unsure = later_peak(levels, factor), unsure_workspace(levels, factor)
        other = other_algorithms_peak(levels, factor)
    size = round(size - unsure)
    doubt = _BETWEEN_RUNS * size
    if later is not None and later > size:
        size = round(later)
        doubt += _MOVED_DOUBT * abs(size - memory.peak_bytes)
    doubt += abs(unsure)
    return PeakMemory(
        size_bytes=size,
        low_bytes=min(low, round(size - doubt)),
        high_bytes=max(high, round(size + doubt), round(other * (1 + _BETWEEN_RUNS))),
    )


def why_unsure(context: StepContext, factor: float) -> tuple[str, ...]:
    """What makes the interval of the peak wide at another batch, in words."""
    memory = context.memory
    if memory is None or memory.largest_batch is None or factor == 1.0:
        return ()
    levels = context.analysis.compute_once(_Known).levels(context)
    if levels is None:
        return ()
    workspace = abs(unsure_workspace(levels, factor))
    then = _peak_of_batch(memory, levels, factor).size_bytes
    other = other_algorithms_peak(levels, factor) - then
    prepared = levels.captured.prepared_bytes or 0
    words = []
    if max(workspace, other) > _WORTH_SAYING * memory.peak_bytes:
        words.append(
            "peak memory: cuDNN chooses how it computes FP32 convolutions. With another "
            "batch it may choose another workspace"
        )
    if prepared * abs(factor - 1.0) > _WORTH_SAYING * memory.peak_bytes:
        words.append(
            f"peak memory: the script holds {figures.size(prepared)} of other batches, which "
            "grow too. The same samples in fewer batches would not"
        )
    return tuple(words)


def peak_of(context: StepContext) -> PeakMemory | None:
    """With all changes made so far."""
    return peak_at_batch(context, context.grown)


def _peak_by_arithmetic(context: StepContext, change: MemoryChange) -> PeakMemory | None:
    """Of a transformer; what a compiler keeps is not known."""
    now, then = _find_parts(context), _find_parts(context, autocast=change.autocast)
    if now is None or then is None or change.fuse:
        return None
    blocks = then.inputs_bytes if change.recompute else then.blocks_bytes
    after = then.peak_bytes(change.batch * (blocks + then.outside_bytes))
    if context.memory is not None:
        before = now.peak_bytes(now.blocks_bytes + now.outside_bytes)
        after = context.memory.peak_bytes - (before - after)
    low, high = round(after * (1 - _DOUBT)), round(after * (1 + _DOUBT))
    return PeakMemory(size_bytes=round(after), low_bytes=low, high_bytes=high)


def _find_parts(context: StepContext, *, autocast: bool = False) -> PeakParts | None:
    model = find_transformer(context.calls) if context.calls else None
    if model is None or context.parameters is None or context.calls is None:
        return None
    rule = context.rule
    if not rule.fused:  # what other optimizers keep is not known
        return None
    if autocast and model.compute_bytes == FULL:
        cast = NARROW * linear_elements(context.calls)
        model = replace(model, compute_bytes=NARROW, cast_bytes=cast)
    tokens = model.batch * model.length
    outside = token_bytes(replace(model, layers=0)) * tokens
    kept = transformer_activations(model, None).total_bytes - model.cast_bytes
    # The gradient of the logits in fp32; without autocast the logits themselves are alive too.
    loss_bytes = tokens * (model.vocabulary or 0) * FULL * (1 if model.compute_bytes < FULL else 2)
    return PeakParts(
        fixed_bytes=rule.state_bytes * context.parameters.elements + model.cast_bytes,
        blocks_bytes=kept - outside,
        inputs_bytes=model.layers * tokens * model.width * model.residual_bytes,
        outside_bytes=outside + loss_bytes,
        optimizer_bytes=_bytes_in_step(context) * context.parameters.elements,
    )


def _bytes_in_step(context: StepContext) -> int:
    """Per parameter: its state, its gradient, and the copy that foreach makes."""
    rule = context.rule
    form = context.update_form or current_form(context)
    copied = form == "foreach" and rule.state_bytes > FULL
    return rule.state_bytes + FULL + (FULL if copied else 0)


# What a trace says about the memory of forward and backward, and their graph does not.

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
    inside = in_step(context)
    marks = rows_named(
        context.trace, host, inside & (host.kind <= HostKind.ANNOTATION), _ZERO_GRAD.match
    )
    nodes = inside & (host.forward_of >= 0)
    if not len(forward) or not marks.any() or not nodes.any():
        return False
    cleared = host.start_ns[marks]
    after = cleared > median(host.start_ns[forward])
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
    inside = in_step(context) & (host.shapes >= 0)
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
