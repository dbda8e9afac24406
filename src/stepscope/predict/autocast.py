"""Predict what autocast changes besides matmuls: elementwise kernels, values that stay in
fp32, fused attention. Also the precision that the step was recorded in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.explain.memory.model import ATTENTION
from stepscope.predict.fitted import fitted, table
from stepscope.predict.kernel_costs import Family, after_start, roofline_ns, with_durations
from stepscope.predict.peak_memory.backward_graph import (
    FULL,
    NARROW,
    AutocastRule,
    autocast_rules,
    autocast_widths,
)
from stepscope.predict.step_context import StepContext, in_step
from stepscope.predict.step_spans import captured_graph, created_nodes
from stepscope.records.change_values import mode_of
from stepscope.records.dtypes import PEAKS
from stepscope.records.hardware import Ceilings
from stepscope.records.memory import CapturedBackward
from stepscope.records.trace import HostKind, Trace
from stepscope.step.edit import Selection, remove
from stepscope.step.graph import Phase, StepGraph
from stepscope.step.work import rows_named
from stepscope.text.words import lazy_pattern
from stepscope.trace.links import distinct, nearest_of
from stepscope.trace.run_folder.rank_facts import read_facts

if TYPE_CHECKING:
    from stepscope.step.graph import Flags, Ints

    Value = tuple[int, int]
    Reads = frozenset[tuple[int, int]]

# Everything but products under autocast: what becomes narrow, and how long it takes then.
#
# The captured backward graph says how wide each operator's inputs and results would be. Without a
# graph, elementwise work counts as narrow; if norms return fp32, the residual stream is fp32 too,
# and only activations are narrow.

NORM = lazy_pattern(r"^aten::(?:native_)?(?:layer|group|rms)_norm$|^aten::_?fused_rms_norm$")
_STAYS_FP32 = lazy_pattern(
    r"norm|softmax|loss|entropy|exp|log|pow|sum|cumsum|embedding|foreach|topk|sort|segment", re.I
)
_ACTIVATION = lazy_pattern(r"gelu|silu|relu|glu|tanh|sigmoid|hardswish|mish", re.I)
# These take as long for each row or window, however many bytes it has.
_BOUND_BY_INDEX = lazy_pattern(r"gather|index|scatter|max_pool", re.I)
_OVER_WINDOWS = lazy_pattern(r"pool|roll")
_ELEMENTWISE = lazy_pattern(r"elementwise_kernel")
_VECTORIZED = lazy_pattern(r"vectorized_elementwise_kernel")
_STRIDED = fitted("kernels.autocast_strided")
_MIXED = fitted("kernels.autocast_mixed")  # a kernel that casts each element it reads
# cuDNN has no batch norm from bf16 to fp32 statistics; PyTorch's own takes this much longer.
_OWN_BATCH_NORM = table("kernels.own_batch_norm", dict[str, float])


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
    stays = context.named(_STAYS_FP32.search)
    width = _find_widths(context)
    unknown = width == Width.UNKNOWN
    if unknown.any():  # guess by names alone
        phase = context.task_phase
        narrow = wide & ~stays & ((phase == Phase.FORWARD) | (phase == Phase.BACKWARD))
        if context.named(NORM.search).any():
            narrow &= context.named(_ACTIVATION.search)
        width = np.where(unknown, np.where(narrow, Width.NARROW, Width.FULL), width)
    by_index = context.named(_BOUND_BY_INDEX.search)
    elementwise = context.kernels_named(_ELEMENTWISE.search)
    strided = elementwise & ~context.kernels_named(_VECTORIZED.search)
    strided |= context.named(_OVER_WINDOWS.search)
    factor = np.where(by_index, 1.0, np.where(strided, _STRIDED, NARROW / FULL))
    factor = np.where(width == Width.NARROW, factor, 1.0)
    factor = np.where((width == Width.MIXED) & elementwise & ~by_index, _MIXED, factor)
    factor = np.where(stays, 1.0, factor)
    dur = graph.tasks.dur_ns
    dur = np.where(others & (factor != 1.0), after_start(dur, factor), dur)
    for name, slower in _OWN_BATCH_NORM.items():
        dur = np.where(context.named(name.__eq__), slower * dur, dur)
    return with_durations(graph, dur)


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
    place = place_of_row[np.where(calls.phase == Phase.BACKWARD, context.created_by, forward)]
    rules = autocast_rules(graph, "cuda")
    widths = autocast_widths(graph, rules, find_wide_reads(context))
    by_node = [_node_width(graph, at, widths, rules[at]) for at in range(len(graph.nodes))]
    of_task: Ints = np.array([*by_node, Width.UNKNOWN], np.int32)[place][context.graph.tasks.call]
    return of_task


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


# How wide the inputs of a step's calls would be under autocast, by the captured backward graph.
#
# The graph's edges say which result an operator reads. Inputs that need no gradient have no edge.

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


# Values that the script asks for in fp32, such as `logits.float()`.
#
# In an fp32 step such a call changes nothing and leaves no node in the backward graph, but the
# trace has it. Under autocast it makes a wide copy of a narrow value, and what follows is computed
# in fp32. A call says how many elements its value has; the value is the newest one of that size.

_TO, _OPERATORS = "aten::to", "aten::"
_FLOAT_CODE = "6"  # PyTorch's number of the dtype


def find_wide_reads(context: StepContext) -> Reads:
    """Inputs that nodes of the captured graph read in fp32 because the script asked for it. Empty
    without a graph, or if the trace has other nodes."""
    graph = captured_graph(context)
    places, rows = created_nodes(context)
    if graph is None or not len(rows):
        return frozenset()
    reads: set[tuple[int, int]] = set()
    for row, elements in _asking_calls(context):
        made = int(np.searchsorted(rows, row))  # rows are in the order of their starts
        newest = next(
            (
                (place, number)
                for place in reversed(places[:made].tolist())
                for number, out in enumerate(graph.nodes[place].outputs)
                if out.elements == elements
            ),
            None,
        )
        reads |= {
            (place, number)
            for place in places[made:].tolist()
            for number, edge in enumerate(graph.nodes[place].inputs)
            if (edge.node, edge.output) == newest
        }
    return frozenset(reads)


def _asking_calls(context: StepContext) -> list[tuple[int, int]]:
    """Rows of the trace, with the elements of their value; not those inside of operators."""
    trace, host = context.trace, context.trace.host
    inside = (host.kind == HostKind.OPERATOR) & in_step(context)
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


# Attention that ran as single operators, and that a fused kernel takes in a narrow dtype.
#
# In fp32 PyTorch has no fused kernel for some attention, for example where several heads of the
# query share one of the key. In bf16 and fp16 flash attention takes whatever has no mask: a few
# kernels instead of many, and nobody keeps the scores.

_UNFUSED = "aten::_scaled_dot_product_attention_math"
_LARGEST_HEAD = 256
_KERNELS = 1, 3  # of a fused forward, and of its backward
_PRODUCTS = 1.0, 2.5  # FLOPs in terms of the forward pass's two products
_PASSES = 1.0, 2.0  # over query, key, value and result


class UnfusedAttention(msgspec.Struct, frozen=True, kw_only=True):
    """One call of forward, with its backward."""

    row: int
    tasks: tuple[Ints, Ints]  # of forward and of backward
    flops: float  # of forward
    elements: int  # of query, key, value and result


def find_unfused_attention(context: StepContext) -> list[UnfusedAttention]:
    """Those of the step that a narrow dtype fuses."""
    host, graph = context.trace.host, context.graph
    unfused = rows_named(context.trace, host, host.kind == HostKind.OPERATOR, _UNFUSED.__eq__)
    if context.on_host or not unfused.any():
        return []
    launched_by = nearest_of(host, unfused, graph.calls.row)[graph.tasks.call]
    creator = nearest_of(host, unfused, context.created_by)[graph.tasks.call]
    found = []
    for row in distinct(launched_by[launched_by >= 0]).tolist():
        sizes = _read_sizes(context, row)
        if sizes is not None:
            forward = np.flatnonzero(launched_by == row).astype(np.int32)
            backward = np.flatnonzero((creator == row) & (launched_by != row)).astype(np.int32)
            flops, elements = sizes
            found.append(
                UnfusedAttention(row=row, tasks=(forward, backward), flops=flops, elements=elements)
            )
    return found


def fuse_attention(
    graph: StepGraph,
    calls: list[UnfusedAttention],
    dtype: str,
    ceilings: Ceilings,
    probed: Flags,
) -> StepGraph:
    """Only the kernels of fused attention are left, with their launches. Tasks that are `probed`
    have the time of the fused call already."""
    dur_ns = graph.tasks.dur_ns.copy()
    gone = np.zeros(len(dur_ns), np.bool_)
    for call in calls:
        for in_backward, tasks in enumerate(call.tasks):
            if not len(tasks):
                continue
            whole_ns = float(dur_ns[tasks].sum())
            if not probed[tasks].all():
                fused_ns = roofline_ns(
                    Family.ATTENTION,
                    np.array([_PRODUCTS[in_backward] * call.flops]),
                    np.array([NARROW * _PASSES[in_backward] * float(call.elements)]),
                    dtype,
                    ceilings,
                    backward=bool(in_backward),
                )
                whole_ns = min(whole_ns, float(fused_ns[0]))
            left = tasks[: _KERNELS[in_backward]]
            gone[tasks] = True
            gone[left] = False
            dur_ns[left] = whole_ns / len(left)
    fused = with_durations(graph, dur_ns)
    launched = np.bincount(graph.tasks.call, minlength=len(graph.calls))
    removed = np.bincount(graph.tasks.call[gone], minlength=len(graph.calls))
    return remove(fused, Selection(calls=(launched > 0) & (removed == launched), tasks=gone))


def find_attention_nodes(context: StepContext) -> tuple[tuple[int, ...], ...]:
    """The nodes of the captured backward graph that belong to each such call."""
    rows = {call.row for call in find_unfused_attention(context)}
    if not rows:
        return ()
    host = context.trace.host
    places, creators = created_nodes(context)
    inside = np.zeros(len(host), np.bool_)
    inside[list(rows)] = True
    owner = nearest_of(host, inside, creators)
    return tuple(tuple(places[owner == row].tolist()) for row in sorted(rows))


def _read_sizes(context: StepContext, row: int) -> tuple[float, int] | None:
    """FLOPs and elements, by the shapes of the call around it; None if no fused kernel takes it."""
    host = context.trace.host
    outer = int(host.parent[row])
    if outer < 0 or context.trace.strings[host.name[outer]] != ATTENTION:
        return None
    if host.shapes[outer] < 0 or host.dtypes[outer] < 0:
        return None
    shapes, dtypes = (
        msgspec.json.decode(context.trace.strings[column[outer]])
        for column in (host.shapes, host.dtypes)
    )
    query, key, value, mask = (shapes + [[]] * 4)[:4]
    if dtypes[0] != _FLOAT:
        return None
    if mask or {len(query), len(key), len(value)} != {4} or query[3] > _LARGEST_HEAD:
        return None
    result = [*query[:3], value[3]]
    flops = 2.0 * math.prod(query[:3]) * key[2] * (query[3] + value[3])
    return flops, sum(math.prod(shape) for shape in (query, key, value, result))


# The precision that a step was recorded in, as the library of operator times names it.
#
# Under autocast an operator calls itself again with inputs in the narrow dtype. Whether fp32
# products ran as tf32 is in rank.json, else in the names of their kernels.

_NARROW = {"c10::BFloat16": "bf16", "c10::Half": "fp16"}


def traced_mode(context: StepContext) -> str:
    """Of the step as it is."""
    return changed_mode(context, _precision(context))


def changed_mode(context: StepContext, precision: str) -> str:
    """The same step in another precision."""
    return mode_of(precision, benchmark=bool(_switches(context).get("cudnn_benchmark")))


def may_convolve_in_tf32(context: StepContext) -> bool:
    """Whether the run let cuDNN use tf32 already; False if that is not known."""
    return bool(_switches(context).get("cudnn_tf32"))


def convolves_in_fp32(context: StepContext) -> bool:
    """Whether the run forbade cuDNN both tf32 and narrow dtypes; False if that is not known."""
    forbidden = _switches(context).get("cudnn_tf32") is False
    return forbidden and not find_autocast(context.trace)


def _switches(context: StepContext) -> dict[str, bool]:
    """torch's, as the run saw them; empty for a bare trace."""
    math = read_facts(Path(context.trace.path).parent).get("math")
    return math if isinstance(math, dict) else {}


def _precision(context: StepContext) -> str:
    narrow = find_autocast(context.trace)
    if narrow:
        return narrow
    switches = _switches(context)
    if switches.get("matmul_tf32") is not None:
        if switches["matmul_tf32"]:
            return "tf32"
        return "fp32" if switches.get("cudnn_tf32") is False else ""
    operators = context.operators
    products = operators.dtype[operators.family == Family.MATMUL]
    return "tf32" if (products == PEAKS.index("tf32")).any() else ""


def find_autocast(trace: Trace) -> str:
    """bf16 or fp16 where autocast made inputs of operators narrow, else empty."""
    host, strings = trace.host, trace.strings
    rows = np.flatnonzero(
        (host.kind == HostKind.OPERATOR) & (host.parent >= 0) & (host.dtypes >= 0)
    )
    above = host.parent[rows]
    cast = (host.name[rows] == host.name[above]) & (host.dtypes[rows] != host.dtypes[above])
    pairs = distinct(
        host.dtypes[above[cast]].astype(np.int64) * len(strings) + host.dtypes[rows[cast]]
    )
    for pair in pairs.tolist():
        wide, narrow = divmod(pair, len(strings))
        for dtype, precision in _NARROW.items():
            if wide >= 0 and dtype in strings[narrow] and '"float"' in strings[wide]:
                return precision
    return ""
