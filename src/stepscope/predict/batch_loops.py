"""Steps that loop: one size cannot tell whether a larger batch makes calls larger or more.

A loop over samples, tasks, observations or micro-batches runs the same layers many times in a step.
So does a loop over time. Twice the batch may then leave Python's time as it is, or double it. Calls
that take one sample out of the batch, as often as it has samples, grow. The script's own lines
outside the model may hold such loops without any call.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.call_tree import distinct_counts, distinct_places
from stepscope.explain.memory.model import FED
from stepscope.explain.replay.graph import Phase
from stepscope.explain.replay.schedule import step_ns
from stepscope.explain.work import DATA_LOADING, rows_named
from stepscope.predict.by_text import by_text
from stepscope.predict.stalls import NORMAL_95
from stepscope.records.figures import milliseconds
from stepscope.records.trace import HostKind

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags, StepGraph
    from stepscope.predict.step_context import StepContext

MANY_RUNS = 4  # of a layer in a step; a pair of twins or a discriminator runs twice
# One standard deviation: the part of the host's fixed time that may grow although no shape shows it
# (data moves on the same thread, allocations and transfers are larger).
_UNSEEN = 0.05
# The same on a CPU, by benchmarks/field_more.toml: 44 public scripts with twice their batch.
_UNSEEN_ON_CPU = 0.25
_HALVINGS = 6  # of what may grow, to find the middle
_LEAST_OWN = 0.03  # of the step
LEAST_TELLING = 8  # a batch: any table may be a multiple of a smaller one
_LEAST_LOOPED = 16  # a batch: layers come as often as a smaller one has samples
# They take a sample, or a number, out of a batch.
_ONE_SAMPLE = frozenset(
    f"aten::{name}" for name in ("select", "item", "_local_scalar_dense", "is_nonzero")
)
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
    each_sample = find_calls_of_samples(context)
    grown = _repeat(context.graph, grown, each_sample, factor)
    least = step_ns(grown)
    updates = _updates(grown)
    most = step_ns(_scale(grown, ~updates, _most_growth(context, grown, factor)))
    part = _UNSEEN_ON_CPU if context.on_host else _UNSEEN
    unseen = part * max(0.0, most / least - 1.0)
    runs = count_layer_runs(context)
    micro_batches = context.calls.micro_batches if context.calls else 1
    if most <= least or factor <= 1.0:
        return GrownLoops(graph=grown, doubt=unseen)
    if max(runs, micro_batches) >= MANY_RUNS:
        times = f"{max(runs, micro_batches):,.0f}"
        words = (
            f"the step runs the same layers {times} times. It is unknown whether a larger "
            "batch means larger calls or more of them, so the interval covers both"
        )
    else:
        may_grow_ns = _own_python_ns(context, each_sample) + wait_for_workers_ns(context)
        may_grow_ns *= factor - 1.0
        if may_grow_ns < _LEAST_OWN * least:
            return GrownLoops(graph=grown, doubt=unseen)
        most = min(most, least + may_grow_ns)
        words = (
            f"{milliseconds(may_grow_ns / (factor - 1.0) / 1e6)} of Python outside the "
            "model, or of waiting for workers, may grow with the batch. The interval covers "
            "both cases"
        )
    return GrownLoops(
        graph=_stretch(context, grown, math.sqrt(least * most), factor),
        doubt=math.hypot(unseen, math.log(most / least) / 2 / NORMAL_95),
        assumption=words,
    )


def _stretch(context: StepContext, grown: StepGraph, wanted_ns: float, factor: float) -> StepGraph:
    """The host's time outside the optimizer grows until the step is as long as wanted."""
    whole = _most_growth(context, grown, factor) - 1
    middle, low, high = grown, 0.0, 1.0
    for _ in range(_HALVINGS):
        part = (low + high) / 2
        middle = _scale(grown, ~_updates(grown), 1 + part * whole)
        if step_ns(middle) < wanted_ns:
            low = part
        else:
            high = part
    return middle


def find_calls_of_samples(context: StepContext) -> Flags:
    """Calls that take a sample out of the batch, made once or so many times for each. Other calls
    may come as often only because the model has as many layers."""
    calls, host = context.graph.calls, context.trace.host
    batch = context.batch
    of_samples = np.zeros(len(calls), np.bool_)
    if not batch or batch < _LEAST_LOOPED or not len(host):
        return of_samples
    known = (calls.row >= 0) & (calls.phase != Phase.OPTIMIZER)
    rows = np.maximum(calls.row, 0)
    kinds = host.name[rows].astype(np.int64) * len(context.trace.strings) + host.shapes[rows]
    _, kind, counts = np.unique(kinds[known], return_inverse=True, return_counts=True)
    of_samples[known] = counts[kind] % batch == 0
    chosen = np.where(known, rows, -1)
    of_samples &= by_text(context.trace, host.name, chosen, _ONE_SAMPLE.__contains__, False)
    return of_samples


def has_batch(shapes: str, batch: int) -> bool:
    """Whether a tensor has a side that is a multiple of the batch."""
    return _holds_multiple(msgspec.json.decode(shapes), batch)


def _holds_multiple(dims: Any, batch: int) -> bool:
    if isinstance(dims, int):
        return dims > 0 and dims % batch == 0
    return any(_holds_multiple(one, batch) for one in dims)


def _repeat(before: StepGraph, grown: StepGraph, chosen: Flags, factor: float) -> StepGraph:
    """These calls come `factor` times as often: all their time, and the time before each, grows."""
    if not chosen.any():
        return grown
    calls, tasks = grown.calls, grown.tasks
    call_ns = np.where(chosen, before.calls.call_ns * factor, calls.call_ns)
    gap_ns = np.where(chosen, before.calls.gap_ns * factor, calls.gap_ns)
    dur_ns = np.where(chosen[tasks.call], before.tasks.dur_ns * factor, tasks.dur_ns)
    return replace(
        grown,
        calls=replace(calls, call_ns=call_ns, gap_ns=gap_ns),
        tasks=replace(tasks, dur_ns=dur_ns),
    )


def wait_for_workers_ns(context: StepContext) -> float:
    """Of a step on a CPU: handing a batch over takes a time of its own, however large it is."""
    run = context.analysis.run
    if not context.on_host or run is None or run.loader is None or not run.loader.workers:
        return 0.0
    host = context.trace.host
    named = host.kind <= HostKind.ANNOTATION
    loading = rows_named(context.trace, host, named, DATA_LOADING.search)
    return float(host.dur_ns[loading].sum()) / max(1, len(context.steps.steps))


def _own_python_ns(context: StepContext, each_sample: Flags) -> float:
    """Python's time outside the model that no call shows to grow. Where the sampled stacks do not
    tell, half of all time between calls. Lines of a device's step may only wait for it."""
    if not context.on_host:
        return 0.0
    calls = context.graph.calls
    between = float(calls.gap_ns[~_updates(context.graph) & ~each_sample].sum())
    run = context.analysis.run
    if run is None or run.own_python is None:
        return between / 2
    own = run.own_python.share * step_ns(context.graph)
    return min(between, max(0.0, own - float(calls.gap_ns[each_sample].sum())))


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
