"""A CPU's step with more samples or fewer: operators grow by their shapes, Python stays.

A product reads and repacks its weights however many samples there are, so with few samples it
hardly grows: its fixed part is that of the weights' bytes against its arithmetic.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.call_tree import Levels
from stepscope.explain.replay.graph import Phase
from stepscope.explain.steps import step_of
from stepscope.explain.work import DATA_LOADING, rows_named
from stepscope.predict.batch_loops import LEAST_TELLING, has_batch, wait_for_workers_ns
from stepscope.predict.by_text import by_text
from stepscope.predict.outcome import Refused
from stepscope.records.trace import ABSENT, HostKind

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags, Floats, Ints, StepGraph
    from stepscope.predict.step_context import StepContext

# Of what the batch changes, one standard deviation, by benchmarks/field_more.toml: with 0.2 only 40
# of 44 public scripts lay inside the 95% interval.
HOST_SPREAD = 0.3
# Of every operator, also of those that an operator calls: dispatch and allocation. Predictions for
# benchmarks/field_more.toml are equally good with 2 to 5 µs.
FIXED_NS = 3_000.0
# FLOPs for which a byte of weights is read and repacked, on a CPU.
FLOPS_PER_BYTE = 16.0
_PRODUCTS = frozenset({"aten::linear", "aten::addmm", "aten::mm", "aten::matmul"})
_NO_SAMPLES = ("AccumulateGrad", ": TBackward", ": TransposeBackward", ": ViewBackward")
_ITEM_BYTES = 4


def grow_on_host(context: StepContext, factor: float) -> tuple[StepGraph, int]:
    """The step with `factor` times the samples, and how many of its calls grow."""
    graph = context.graph
    growing = _find_growing(context)
    if not growing.any():
        raise Refused("batch: no operator's shapes depend on the batch")
    calls = graph.calls
    dispatch = FIXED_NS * _count_operators(context)
    fixed = dispatch + _fixed_share(context) * np.maximum(calls.call_ns - dispatch, 0.0)
    fixed = np.minimum(fixed, calls.call_ns)
    call_ns = np.where(growing, fixed + (calls.call_ns - fixed) * factor, calls.call_ns)
    gap_ns = _grow_loading(context, factor)
    return replace(graph, calls=replace(calls, call_ns=call_ns, gap_ns=gap_ns)), int(growing.sum())


def _count_operators(context: StepContext) -> Floats:
    """Of each call: itself and those that it calls; the nodes of backward call several."""
    host, rows = context.trace.host, context.graph.calls.row
    if not len(host):
        return np.ones(len(rows))
    inside = Levels.of(host.parent).inclusive(np.ones(len(host), np.int64))
    return np.where(rows >= 0, inside[np.maximum(rows, 0)], 1).astype(np.float64)


def _find_growing(context: StepContext) -> Flags:
    """Calls of forward and backward that touch anything besides parameters."""
    calls, trace = context.graph.calls, context.trace
    in_pass = (calls.phase != Phase.OPTIMIZER) & (calls.row >= 0)
    known = set(context.parameters.shapes) if context.parameters else set()
    known |= {shape[::-1] for shape in known}

    def has_samples(shapes: str) -> bool:
        dims = [tuple(one) for one in msgspec.json.decode(shapes) if one and _is_shape(one)]
        return not dims or not known.issuperset(dims)

    def may_grow(name: str) -> bool:
        return not any(word in name for word in _NO_SAMPLES)

    rows = np.where(in_pass, calls.row, ABSENT)
    growing: Flags = in_pass & by_text(trace, trace.host.shapes, rows, has_samples, True)
    growing &= by_text(trace, trace.host.name, rows, may_grow, True)
    return growing & ~_same_in_every_step(context, rows)


def _same_in_every_step(context: StepContext, rows: Ints) -> Flags:
    """Calls without a side of the batch's length, whose shapes every traced step has: tables that
    each step reads whole, as the graph of a recommender. A batch of graphs has no such side either,
    but its shapes differ from step to step."""
    batch, trace = context.batch, context.trace
    if not batch or batch < LEAST_TELLING:
        return np.zeros(len(rows), np.bool_)

    without: Flags = ~by_text(
        trace, trace.host.shapes, rows, lambda shapes: has_batch(shapes, batch), True
    )
    steady = _steady_shapes(context)
    shapes = trace.host.shapes[np.maximum(rows, 0)]
    return without & (rows >= 0) & (shapes >= 0) & steady[np.maximum(shapes, 0)]


def _steady_shapes(context: StepContext) -> Flags:
    """By the text of a call's shapes: whether every traced step has calls with them."""
    host, steps = context.trace.host, context.steps.steps
    steady = np.zeros(len(context.trace.strings), np.bool_)
    number = step_of(steps, host.start_ns)
    known = (number >= 0) & (host.shapes >= 0)
    if len(steps) < 2 or not known.any():
        return steady
    pairs = np.unique(host.shapes[known].astype(np.int64) * len(steps) + number[known])
    shapes, seen = np.unique(pairs // len(steps), return_counts=True)
    steady[shapes[seen == len(steps)]] = True
    return steady


def _is_shape(dims: list[Any]) -> bool:
    return isinstance(dims[0], int)


def _fixed_share(context: StepContext) -> Floats:
    """The part of each product that its weights cause; a backward's is that of its forward."""
    host, trace = context.trace.host, context.trace
    rows: Ints = context.graph.calls.row
    if not len(host):
        return np.zeros(len(rows))
    at = np.maximum(rows, 0)
    forward = np.where(host.forward_of[at] >= 0, host.forward_of[at], rows).astype(np.int32)
    is_product = by_text(trace, host.name, forward, lambda name: name in _PRODUCTS, False)
    share: Floats = by_text(trace, host.shapes, forward, weights_share, 0.0)
    return np.where(is_product, share, 0.0)


def weights_share(shapes: str) -> float:
    """Of a product with these shapes: time for its weights over all of its time."""
    matrices = [dims for dims in msgspec.json.decode(shapes) if len(dims) >= 2 and _is_shape(dims)]
    if len(matrices) < 2:
        return 0.0
    left, right = matrices[-2:] if len(matrices[0]) == 2 else matrices[:2]
    rows = math.prod(left[:-1])
    flops = 2.0 * rows * math.prod(right)
    weights = FLOPS_PER_BYTE * _ITEM_BYTES * math.prod(right)
    return weights / (weights + flops) if flops else 0.0


def _grow_loading(context: StepContext, factor: float) -> Floats:
    """A batch is collated sample by sample: the wait for it grows. It is the longest time without a
    call in forward: loaders make calls of their own before it."""
    calls, host = context.graph.calls, context.trace.host
    gaps = calls.gap_ns.copy()
    named = host.kind <= HostKind.ANNOTATION
    loading = rows_named(context.trace, host, named, DATA_LOADING.search)
    steps = max(1, len(context.steps.steps))
    loading_ns = float(host.dur_ns[loading].sum()) / steps
    forward = np.flatnonzero((calls.phase == Phase.FORWARD) & (calls.row >= 0))
    if len(forward) and loading_ns and not wait_for_workers_ns(context):
        waits = forward[np.argmax(gaps[forward])]
        gaps[waits] += min(loading_ns, gaps[waits]) * (factor - 1)
    return gaps
