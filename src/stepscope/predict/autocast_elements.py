"""Everything but products under autocast: what becomes narrow, and how long it takes then.

The captured backward graph says how wide each operator's inputs and results would be. Without a
graph, elementwise work counts as narrow; if norms return fp32, the residual stream is fp32 too, and
only activations are narrow.

The factors are those of operators that `probe` timed both ways on an H200: all their time in bf16
over all their time in fp32, of twelve library models (adds by index: of one).
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.graph import Phase
from stepscope.predict.asked_for_fp32 import find_wide_reads
from stepscope.predict.block_spans import captured_graph, created_nodes
from stepscope.predict.by_text import by_text
from stepscope.predict.kernels import FLOOR_NS
from stepscope.predict.peak_memory.autocast_widths import (
    FULL,
    NARROW,
    AutocastRule,
    autocast_rules,
    autocast_widths,
)
from stepscope.records.lazy_pattern import lazy_pattern
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.explain.replay.graph import Flags, Floats, Ints, StepGraph
    from stepscope.predict.step_context import StepContext
    from stepscope.records.backward_graph import CapturedBackward

NORM = lazy_pattern(r"^aten::(?:native_)?(?:layer|group|rms)_norm$|^aten::_?fused_rms_norm$")
_STAYS_FP32 = lazy_pattern(
    r"norm|softmax|loss|entropy|exp|log|pow|sum|cumsum|embedding|foreach|topk|sort|segment", re.I
)
_ACTIVATION = lazy_pattern(r"gelu|silu|relu|glu|tanh|sigmoid|hardswish|mish", re.I)
# These take as long for each row or window, however many bytes it has.
_BOUND_BY_INDEX = lazy_pattern(r"gather|index|scatter|max_pool", re.I)
_OVER_WINDOWS = lazy_pattern(r"pool|roll")
_ATOMIC_ADDS = lazy_pattern(r"index_add|scatter_add")
_ELEMENTWISE = lazy_pattern(r"elementwise_kernel")
_VECTORIZED = lazy_pattern(r"vectorized_elementwise_kernel")
_HALF_BYTES, _STRIDED, _NARROW_ATOMICS = 0.5, 0.8, 1.15
_MIXED = 1.3  # a kernel that casts each element it reads
# cuDNN has no batch norm from bf16 to fp32 statistics; PyTorch's own takes this much longer.
_OWN_BATCH_NORM = {"aten::cudnn_batch_norm": 1.67, "aten::cudnn_batch_norm_backward": 1.25}


class Width(IntEnum):
    """What an operator reads and writes."""

    FULL = 0
    MIXED = 1
    NARROW = 2
    UNKNOWN = 3


def retime_elements(
    context: StepContext, graph: StepGraph, wide: Flags, others: Flags
) -> StepGraph:
    """`others` are tasks that are no products, `wide` those that may become narrower."""
    width = _find_widths(context)
    guessed = np.where(wide & _guess_narrow(context), Width.NARROW, Width.FULL)
    factor = _factors(context, np.where(width == Width.UNKNOWN, guessed, width))
    dur = graph.tasks.dur_ns
    retimed = np.minimum(dur, FLOOR_NS) + np.maximum(dur - FLOOR_NS, 0.0) * factor
    dur = np.where(others & (factor != 1.0), retimed, dur)
    for name, slower in _OWN_BATCH_NORM.items():
        dur = np.where(context.named(name.__eq__), slower * dur, dur)
    return replace(graph, tasks=replace(graph.tasks, dur_ns=dur))


def _factors(context: StepContext, width: Ints) -> Floats:
    by_index = context.named(_BOUND_BY_INDEX.search)
    elementwise = _of_kernel(context, _ELEMENTWISE.search)
    strided = elementwise & ~_of_kernel(context, _VECTORIZED.search)
    strided |= context.named(_OVER_WINDOWS.search)
    factor = np.where(strided, _STRIDED, _HALF_BYTES)
    factor = np.where(by_index, 1.0, factor)
    factor = np.where(context.named(_ATOMIC_ADDS.search), _NARROW_ATOMICS, factor)
    mixed = np.where(elementwise & ~by_index, _MIXED, 1.0)
    factor = np.where(width == Width.NARROW, factor, 1.0)
    stays = context.named(_STAYS_FP32.search)
    chosen: Floats = np.where(width == Width.MIXED, mixed, factor)
    return np.where(stays, 1.0, chosen)


def _of_kernel(context: StepContext, matches: Callable[[str], object]) -> Flags:
    trace, rows = context.trace, context.graph.tasks.row
    return by_text(trace, trace.device.name, rows, lambda name: bool(matches(name)), False)


def _guess_narrow(context: StepContext) -> Flags:
    """By names alone."""
    phase = context.task_phase
    stays = context.named(_STAYS_FP32.search)
    if context.named(NORM.search).any():
        stays |= ~context.named(_ACTIVATION.search)
    narrow: Flags = ~stays & ((phase == Phase.FORWARD) | (phase == Phase.BACKWARD))
    return narrow


def _find_widths(context: StepContext) -> Ints:
    """Of each task, by the node of the captured graph that its operator created."""
    host, calls = context.trace.host, context.graph.calls
    graph = captured_graph(context)
    places, rows = created_nodes(context)
    if graph is None or not len(rows):
        return np.full(len(context.graph.tasks), Width.UNKNOWN, np.int32)
    place_of_row = np.full(len(host) + 1, -1, np.int32)  # the last one for no row
    place_of_row[rows] = places
    creates = place_of_row[:-1] >= 0
    forward = nearest_of(host, creates, calls.row)
    backward = np.where(calls.operator >= 0, host.forward_of[np.maximum(calls.operator, 0)], -1)
    place = place_of_row[np.where(calls.phase == Phase.BACKWARD, backward, forward)]
    widths = np.array([*_node_widths(graph, find_wide_reads(context)), Width.UNKNOWN], np.int32)
    of_task: Ints = widths[place][context.graph.tasks.call]
    return of_task


def _node_widths(
    graph: CapturedBackward, wide_reads: frozenset[tuple[int, int]] = frozenset()
) -> list[Width]:
    rules = autocast_rules(graph, "cuda")
    widths = autocast_widths(graph, rules, wide_reads)
    return [_node_width(graph, place, widths, rules[place]) for place in range(len(graph.nodes))]


def _node_width(
    graph: CapturedBackward, place: int, widths: list[list[int]], rule: AutocastRule
) -> Width:
    node = graph.nodes[place]
    if not node.outputs or node.outputs[0].dtype != "float32":
        return Width.UNKNOWN
    if rule == AutocastRule.FULL:
        return Width.FULL
    if rule == AutocastRule.NARROW:  # its inputs are cast before: the sum with a bias is narrow
        return Width.NARROW
    if rule == AutocastRule.WIDEST and widths[place][0] == NARROW:
        return Width.NARROW  # whatever the script cast to this dtype
    joined = {widths[place][0]}
    for edge in node.inputs:
        outputs = graph.nodes[edge.node].outputs if edge.node >= 0 else []
        if edge.output < len(outputs) and outputs[edge.output].elements > 1:
            joined.add(widths[edge.node][edge.output])
    if joined == {NARROW}:
        return Width.NARROW
    return Width.FULL if joined == {FULL} else Width.MIXED
