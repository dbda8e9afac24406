"""Attention that ran as single operators, and that a fused kernel takes in a narrow dtype.

In fp32 PyTorch has no fused kernel for some attention, for example where several heads of the
query share one of the key. In bf16 and fp16 flash attention takes whatever has no mask: a few
kernels instead of many, and nobody keeps the scores.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.work import rows_named
from stepscope.predict.block_spans import created_nodes
from stepscope.predict.edit import Selection, remove
from stepscope.predict.kernels import Family, roofline_ns
from stepscope.records.trace import HostKind
from stepscope.trace.links import distinct, nearest_of

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags, Floats, Ints, StepGraph
    from stepscope.predict.step_context import StepContext
    from stepscope.records.efficiency import Ceilings

_ATTENTION = "aten::scaled_dot_product_attention"
_UNFUSED = "aten::_scaled_dot_product_attention_math"
_FLOAT = "float"
_LARGEST_HEAD = 256
_KERNELS = 1, 3  # of a fused forward, and of its backward
_PRODUCTS = 1.0, 2.5  # FLOPs in terms of the forward pass's two products
_PASSES = 1.0, 2.0  # over query, key, value and result
_NARROW_BYTES = 2


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
    operator = graph.calls.operator
    created_by = np.where(operator >= 0, host.forward_of[np.maximum(operator, 0)], -1)
    creator = nearest_of(host, unfused, created_by)[graph.tasks.call]
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
                whole_ns = min(whole_ns, _fused_ns(call, dtype, ceilings, bool(in_backward)))
            left = tasks[: _KERNELS[in_backward]]
            gone[tasks] = True
            gone[left] = False
            dur_ns[left] = whole_ns / len(left)
    fused = replace(graph, tasks=replace(graph.tasks, dur_ns=dur_ns))
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


def _fused_ns(call: UnfusedAttention, dtype: str, ceilings: Ceilings, in_backward: bool) -> float:
    moved = _NARROW_BYTES * _PASSES[in_backward] * call.elements
    times: Floats = roofline_ns(
        Family.ATTENTION,
        np.array([_PRODUCTS[in_backward] * call.flops]),
        np.array([moved]),
        dtype,
        ceilings,
        backward=in_backward,
    )
    return float(times[0])


def _read_sizes(context: StepContext, row: int) -> tuple[float, int] | None:
    """FLOPs and elements, by the shapes of the call around it; None if no fused kernel takes it."""
    host = context.trace.host
    outer = int(host.parent[row])
    if outer < 0 or context.trace.strings[host.name[outer]] != _ATTENTION:
        return None
    if host.shapes[outer] < 0 or host.dtypes[outer] < 0:
        return None
    columns = (host.shapes, host.dtypes)
    shapes, dtypes = (
        msgspec.json.decode(context.trace.strings[column[outer]]) for column in columns
    )
    query, key, value, mask = (shapes + [[]] * 4)[:4]
    if dtypes[0] != _FLOAT:
        return None
    if mask or {len(query), len(key), len(value)} != {4} or query[3] > _LARGEST_HEAD:
        return None
    result = [*query[:3], value[3]]
    flops = 2.0 * math.prod(query[:3]) * key[2] * (query[3] + value[3])
    return flops, sum(math.prod(shape) for shape in (query, key, value, result))
