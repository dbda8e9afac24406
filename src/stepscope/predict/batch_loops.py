"""Steps that loop: one size cannot tell whether a larger batch makes calls larger or more.

A loop over samples, tasks, observations or micro-batches runs the same layers many times in a step.
So does a loop over time. Twice the batch may then leave Python's time as it is, or double it.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.call_tree import distinct_counts, distinct_places
from stepscope.explain.memory.model import FED
from stepscope.explain.replay.graph import Phase
from stepscope.explain.replay.schedule import step_ns
from stepscope.predict.stalls import NORMAL_95

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags, StepGraph
    from stepscope.predict.step_context import StepContext

MANY_RUNS = 4  # of a layer in a step; a pair of twins or a discriminator runs twice
# One standard deviation: the part of the host's fixed time that may grow although no shape shows it
# (data moves on the same thread, allocations and transfers are larger).
_UNSEEN = 0.05
_HALVINGS = 6  # of what may grow, to find the middle
_LAYERS = (*FED, "aten::addmm")


def count_layer_runs(context: StepContext) -> float:
    """How often the step runs its layers, at most: once in a plain step."""
    host, calls = context.trace.host, context.graph.calls
    if context.parameters is None or not len(host):
        return 1.0
    in_forward = (calls.phase != Phase.BACKWARD) & (calls.phase != Phase.OPTIMIZER)
    rows = calls.operator[in_forward & (calls.operator >= 0)]
    rows = distinct_places(rows)[0]
    strings = context.trace.strings
    layers = Counter(context.parameters.shapes)
    runs: Counter[tuple[int, ...]] = Counter()
    rows = rows[host.shapes[rows] >= 0]
    kinds, counts = distinct_counts(
        host.name[rows].astype(np.int64) * len(strings) + host.shapes[rows]
    )
    for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
        name, shapes = divmod(kind, len(strings))
        if strings[name] in _LAYERS:
            weights = _weights_of(strings[shapes], layers)
            if weights is not None:
                runs[weights] += count
    return max((count / layers[weights] for weights, count in runs.items()), default=1.0)


def _weights_of(shapes: str, layers: Counter[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The parameter among a layer's inputs; addmm takes it transposed."""
    for dims in msgspec.json.decode(shapes):
        if len(dims) < 2 or not isinstance(dims[0], int):
            continue
        for shape in (tuple(dims), tuple(dims[::-1])):
            if shape in layers:
                return shape
    return None


class GrownLoops(msgspec.Struct, frozen=True, kw_only=True):
    """A step with another batch, between what grows for sure and all that may grow."""

    graph: StepGraph
    doubt: float  # of the step's logarithm, one standard deviation
    assumption: str = ""


def allow_for_loops(context: StepContext, grown: StepGraph, factor: float) -> GrownLoops:
    """Where the step loops, halfway (on a logarithmic scale) to a step whose loops all grow."""
    least = step_ns(grown)
    updates = _updates(grown)
    most = step_ns(_scale(grown, ~updates, _most_growth(context, grown, factor)))
    unseen = _UNSEEN * max(0.0, most / least - 1.0)
    runs = count_layer_runs(context)
    micro_batches = context.calls.micro_batches if context.calls else 1
    if max(runs, micro_batches) < MANY_RUNS or most <= least or factor <= 1.0:
        return GrownLoops(graph=grown, doubt=unseen)
    middle, low, high = grown, 0.0, 1.0
    for _ in range(_HALVINGS):
        part = (low + high) / 2
        middle = _scale(grown, ~updates, 1 + part * (_most_growth(context, grown, factor) - 1))
        if step_ns(middle) < math.sqrt(least * most):
            low = part
        else:
            high = part
    times = f"{max(runs, micro_batches):,.0f}"
    return GrownLoops(
        graph=middle,
        doubt=math.log(most / least) / 2 / NORMAL_95,
        assumption=f"the step runs the same layers {times} times: whether a larger batch means "
        "larger calls or more of them is not known, so the interval holds both",
    )


def _updates(graph: StepGraph) -> Flags:
    flags: Flags = graph.calls.phase == Phase.OPTIMIZER
    return flags


def _most_growth(context: StepContext, grown: StepGraph, factor: float) -> float:
    """What the host's time outside the optimizer would grow by, if all of it grew."""
    others = ~_updates(grown)
    before = _host_ns(context.graph, ~_updates(context.graph))
    after = _host_ns(grown, others)
    return max(1.0, factor * before / after) if after else 1.0


def _host_ns(graph: StepGraph, chosen: Flags) -> float:
    return float((graph.calls.gap_ns + graph.calls.call_ns)[chosen].sum() + graph.end_ns)


def _scale(graph: StepGraph, chosen: Flags, by: float) -> StepGraph:
    calls = graph.calls
    times = np.where(chosen, by, 1.0)
    scaled = replace(calls, gap_ns=calls.gap_ns * times, call_ns=calls.call_ns * times)
    return replace(graph, calls=scaled, end_ns=graph.end_ns * by)
