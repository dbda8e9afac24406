"""Predict a step with more samples or fewer, on a GPU or a CPU.

Kernels grow by their shapes; host time stays unless the step may loop over samples.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.memory.model import EMBEDDING, FED
from stepscope.predict.declaration import Outcome, Refused
from stepscope.predict.fitted import fitted
from stepscope.predict.kernel_costs import Family, after_start, retime_tasks
from stepscope.predict.operator_library import ProbedStep, find_probed_batch
from stepscope.predict.peaks import peak_at_batch
from stepscope.predict.stalls import PER_SAMPLES, grow_stalls
from stepscope.predict.step_context import StepContext
from stepscope.predict.tensor_cores import find_sample_convolutions
from stepscope.records.dtypes import PEAK_BYTES
from stepscope.records.normal import NORMAL_95
from stepscope.records.trace import ABSENT, HostKind
from stepscope.step.call_tree import (
    Levels,
    by_text,
    distinct_counts,
    distinct_places,
    tensor_shapes,
)
from stepscope.step.edit import scale_calls
from stepscope.step.graph import Phase, StepGraph
from stepscope.step.replay import step_ns
from stepscope.step.steps import step_of
from stepscope.step.work import DATA_LOADING, rows_named
from stepscope.text.figures import milliseconds
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from stepscope.step.graph import Flags, Floats, Ints

SPREAD = fitted("doubts.batch")
TAIL = fitted("kernels.wave_tail")  # of a wave of blocks: what the last one leaves idle
_HALF_BLOCKS = fitted("kernels.half_blocks")  # smaller blocks read their inputs more often
# Recurrent layers multiply as many rows as there are samples, and libraries have other kernels for
# other numbers of rows. cuDNN chooses the algorithm of convolutions that sum over the samples by
# shapes that few models have.
_RECURRENT_DOUBT = fitted("doubts.recurrent_batch")
_SAMPLES_DOUBT = fitted("doubts.sample_convolutions")


class _GrownStep(NamedTuple):
    graph: StepGraph
    grows: str  # how much of the step grows, and what stays
    rule: str
    spread: float
    doubt: float = 0.0  # about algorithms that change with the batch


def grow_batch(context: StepContext, factor: float) -> Outcome:
    probed, _ = find_probed_batch(context, factor)
    grown = (_grow_calls if context.on_host else _grow_tasks)(context, factor, probed)
    known_doubt = probed.error * (1.0 - probed.modelled_share) if probed else 0.0
    loops = allow_for_loops(context, grown.graph, factor)
    batch = round(context.batch * factor) if context.batch else None
    sizes = f"{context.batch} -> {batch}" if batch is not None else f"x{factor:g}"
    said = [f"batch {sizes}: {grown.grows}"]
    said += [loops.assumption] if loops.assumption else []
    said.append(grown.rule)
    said += [probed.describe("modelled")] if probed else []
    stalls = context.stalls
    if stalls is not None and stalls.cost_ns.get("data"):
        said.append(
            f"data stalls grow {factor:g} times: the loader needs that much longer for a batch"
        )
    if stalls is not None and stalls.by_count(PER_SAMPLES):
        said.append(
            "evaluation and rollouts may come after as many steps or after as many samples "
            "as now. The interval covers both"
        )
    return Outcome(
        context=replace(
            context,
            graph=loops.graph,
            batch=batch,
            grown=context.grown * factor,
            stalls=grow_stalls(stalls, factor),
        ),
        assumptions=tuple(said),
        spread=grown.spread * (probed.modelled_share if probed else 1.0),
        doubt=math.hypot(known_doubt, grown.doubt, loops.doubt),
        samples=factor,
        peak=peak_at_batch(context, context.grown * factor),
    )


def _grow_tasks(context: StepContext, factor: float, probed: ProbedStep | None) -> _GrownStep:
    growing = find_growing_tasks(context)
    if not growing.any():
        raise Refused("batch: no kernel's shapes depend on the batch")
    tasks, operators = context.graph.tasks, context.operators
    dur_ns = np.where(growing, _grown_ns(context, factor), tasks.dur_ns)
    modelled = np.ones(len(dur_ns), np.bool_)
    if probed:
        dur_ns = np.where(growing & probed.known, tasks.dur_ns * probed.factor, dur_ns)
        modelled = ~probed.known
    # Algorithms that change with the batch, by their shares of the device's time.
    recurrent = modelled & (operators.family == Family.RECURRENT)
    samples = modelled & find_sample_convolutions(context)
    doubtful_ns = _RECURRENT_DOUBT * float(dur_ns[recurrent].sum())
    doubtful_ns += _SAMPLES_DOUBT * float(dur_ns[samples].sum())
    return _GrownStep(
        graph=retime_tasks(context.graph, dur_ns, operators.row),
        grows=f"{int(growing.sum()):,} of {len(tasks):,} kernels and copies grow with it. CPU time "
        "and the optimizer stay the same",
        rule="a kernel takes longer only once it fills the GPU",
        spread=SPREAD,
        doubt=doubtful_ns / max(1.0, float(dur_ns.sum())),
    )


def _grow_calls(context: StepContext, factor: float, probed: ProbedStep | None) -> _GrownStep:
    graph, growing = grow_on_host(context, factor)
    if probed:
        calls, before = graph.calls, context.graph.calls
        grows = probed.known & (calls.call_ns != before.call_ns)
        call_ns = np.where(grows, before.call_ns * probed.factor, calls.call_ns)
        graph = replace(graph, calls=replace(calls, call_ns=call_ns))
    return _GrownStep(
        graph=graph,
        grows=f"{growing:,} of {len(graph.calls):,} operators grow with it. Python's time and the "
        "optimizer stay the same",
        rule="reading a matmul's weights takes the same time. Everything else grows with the batch",
        spread=HOST_SPREAD,
    )


def find_growing_tasks(context: StepContext) -> Flags:
    """Tasks of forward and backward that touch anything besides parameters."""
    phase = context.task_phase
    in_pass = (phase == Phase.FORWARD) | (phase == Phase.BACKWARD) | (phase == Phase.DATA)
    known = context.weight_shapes

    def has_others(text: str) -> bool:
        shapes = [dims for dims in msgspec.json.decode(text) if dims]
        lists = any(isinstance(shape[0], list) for shape in shapes)  # of tensors: no parameter
        return not shapes or lists or not known.issuperset(map(tuple, shapes))

    rows = np.where(in_pass, context.operators.row, -1)
    growing: Flags = in_pass & by_text(
        context.trace, context.trace.host.shapes, rows, has_others, True
    )
    return growing


def _grown_ns(context: StepContext, factor: float) -> Floats:
    """A start-up that stays, and a rest that grows.

    Products grow with the number of waves of blocks that the device has to run. Other kernels move
    bytes, or their blocks loop over the samples (batch norms, and gradients of weights).
    """
    tasks = context.graph.tasks
    blocks = task_blocks(context)
    waves = float(context.multiprocessors)

    def in_waves(many: Floats) -> Floats:
        whole: Floats = np.maximum(1.0, many / waves + TAIL)
        return whole

    def product_time(grown: float) -> Floats:
        """For `grown` times the traced samples. Where fewer samples leave the device partly idle, a
        library takes blocks of half the size. They cost more: with the traced samples it did not
        take them."""
        as_traced = in_waves(grown * blocks)
        if grown >= 1.0:
            return as_traced
        dearer = np.maximum(_HALF_BLOCKS, 2.0 * in_waves(blocks) / in_waves(2.0 * blocks))
        smaller: Floats = np.minimum(as_traced, dearer * in_waves(2.0 * grown * blocks) / 2.0)
        return smaller

    before, after = product_time(context.grown), product_time(context.grown * factor)
    product = (
        (blocks > 0) & (context.operators.family != Family.OTHER) & ~_find_weight_gradients(context)
    )
    return after_start(tasks.dur_ns, np.where(product, after / before, factor))


def _find_weight_gradients(context: StepContext) -> Flags:
    """Products that sum over the samples: their blocks are as many with any batch, and each takes
    longer. Kernels' names reveal those of convolutions, except in the backward of a backward;
    others return a parameter's shape."""
    trace, operators, known = context.trace, context.operators, context.weight_shapes

    def returns_parameter(shapes: str) -> bool:
        matrices = [shape for shape in tensor_shapes(shapes) if len(shape) == 2]
        return len(matrices) == 2 and (matrices[0][0], matrices[1][1]) in known

    backward = context.task_phase == Phase.BACKWARD
    matmul = np.where(backward & (operators.family == Family.MATMUL), operators.row, -1)
    by_result: Flags = by_text(trace, trace.host.shapes, matmul, returns_parameter, False)
    by_name = context.kernels_named(lambda name: "wgrad" in name)
    return by_name | by_result | find_sample_convolutions(context)


def task_blocks(context: StepContext) -> Floats:
    """Thread blocks of each task's kernel as traced, 0 if the trace does not say."""

    def count(grid: str) -> float:
        return float(math.prod(msgspec.json.decode(grid)))

    return by_text(context.trace, context.trace.device.grid, context.graph.tasks.row, count, 0.0)


# A CPU's step with more samples or fewer: operators grow by their shapes, Python stays.
#
# A product reads and repacks its weights however many samples there are, so with few samples it
# hardly grows: its fixed part is that of the weights' bytes against its arithmetic.

# Of what the batch changes, one standard deviation.
HOST_SPREAD = fitted("doubts.batch_on_cpu")
# Of every operator, also of those that an operator calls: dispatch and allocation.
FIXED_NS = fitted("host.cpu_fixed_ns")
# FLOPs for which a byte of weights is read and repacked, on a CPU.
FLOPS_PER_BYTE = fitted("host.cpu_flops_per_byte")
_PRODUCTS = frozenset({"aten::linear", "aten::addmm", "aten::mm", "aten::matmul"})
_NO_SAMPLES = ("AccumulateGrad", ": TBackward", ": TransposeBackward", ": ViewBackward")


def grow_on_host(context: StepContext, factor: float) -> tuple[StepGraph, int]:
    """The step with `factor` times the samples, and how many of its calls grow."""
    graph, host, trace = context.graph, context.trace.host, context.trace
    growing = _find_growing(context)
    if not growing.any():
        raise Refused("batch: no operator's shapes depend on the batch")
    calls = graph.calls
    # Operators that each call makes, itself among them; the nodes of backward call several.
    operators, weights = np.ones(len(calls)), np.zeros(len(calls))
    if len(host):
        at = np.maximum(calls.row, 0)
        inside = Levels.of(host.parent).inclusive(np.ones(len(host), np.int64))
        operators = np.where(calls.row >= 0, inside[at], 1).astype(np.float64)
        # The part of each product that its weights cause; a backward's is that of its forward.
        made_by = np.where(host.forward_of[at] >= 0, host.forward_of[at], calls.row)
        forward = made_by.astype(np.int32)
        is_product = by_text(trace, host.name, forward, lambda name: name in _PRODUCTS, False)
        share = by_text(trace, host.shapes, forward, weights_share, 0.0)
        weights = np.where(is_product, share, 0.0)
    dispatch = FIXED_NS * operators
    fixed = dispatch + weights * np.maximum(calls.call_ns - dispatch, 0.0)
    fixed = np.minimum(fixed, calls.call_ns)
    call_ns = np.where(growing, fixed + (calls.call_ns - fixed) * factor, calls.call_ns)
    # A batch is collated sample by sample, so the wait for it grows. It is the longest time without
    # a call in forward: loaders make calls of their own before it.
    gap_ns, loading_ns = calls.gap_ns.copy(), _loading_ns(context)
    passes = np.flatnonzero((calls.phase == Phase.FORWARD) & (calls.row >= 0))
    if len(passes) and loading_ns and not wait_for_workers_ns(context):
        waits = passes[np.argmax(gap_ns[passes])]
        gap_ns[waits] += min(loading_ns, gap_ns[waits]) * (factor - 1)
    return replace(graph, calls=replace(calls, call_ns=call_ns, gap_ns=gap_ns)), int(growing.sum())


def _find_growing(context: StepContext) -> Flags:
    """Calls of forward and backward that touch anything besides parameters."""
    calls, trace = context.graph.calls, context.trace
    in_pass = (calls.phase != Phase.OPTIMIZER) & (calls.row >= 0)
    known = context.weight_shapes

    def has_samples(shapes: str) -> bool:
        given = filter(None, msgspec.json.decode(shapes))
        tensors = [tuple(dims) for dims in given if isinstance(dims[0], int)]
        return not tensors or not known.issuperset(tensors)

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
    batch, trace, steps = context.batch, context.trace, context.steps.steps
    host = trace.host
    number = step_of(steps, host.start_ns)
    known = (number >= 0) & (host.shapes >= 0)
    if not batch or batch < LEAST_TELLING or len(steps) < 2 or not known.any():
        return np.zeros(len(rows), np.bool_)
    pairs = distinct(host.shapes[known].astype(np.int64) * len(steps) + number[known])
    shapes, seen = np.unique(pairs // len(steps), return_counts=True)
    steady = np.isin(host.shapes[np.maximum(rows, 0)], shapes[seen == len(steps)])
    sized = by_text(trace, host.shapes, rows, lambda text: has_batch(text, batch), True)
    without: Flags = ~sized
    return without & (rows >= 0) & steady


def weights_share(shapes: str) -> float:
    """Of a product with these shapes: time for its weights over all of its time."""
    several_sides = (dims for dims in msgspec.json.decode(shapes) if len(dims) > 1)
    matrices = [dims for dims in several_sides if isinstance(dims[0], int)]
    if len(matrices) < 2:
        return 0.0
    left, right = matrices[-2:] if len(matrices[0]) == 2 else matrices[:2]
    rows = math.prod(left[:-1])
    flops = 2.0 * rows * math.prod(right)
    weights = FLOPS_PER_BYTE * PEAK_BYTES["fp32"] * math.prod(right)
    return weights / (weights + flops) if flops else 0.0


# Steps that loop: one size cannot tell whether a larger batch makes calls larger or more.
#
# A loop over samples, tasks, observations or micro-batches runs the same layers many times in a
# step. So does a loop over time. Twice the batch may then leave Python's time as it is, or double
# it. Calls that take one sample out of the batch, as often as it has samples, grow. The script's
# own lines outside the model may hold such loops without any call.

MANY_RUNS = 4  # of a layer in a step; a pair of twins or a discriminator runs twice
# One standard deviation: the part of the host's fixed time that may grow although no shape shows it
# (data moves on the same thread, allocations and transfers are larger).
_UNSEEN = fitted("doubts.unseen_growth")
_UNSEEN_ON_CPU = fitted("doubts.unseen_growth_on_cpu")
_HALVINGS = 6  # of what may grow, to find the middle
_LEAST_OWN = 0.03  # of the step
LEAST_TELLING = 8  # a batch: any table may be a multiple of a smaller one
_LEAST_LOOPED = 16  # a batch: layers come as often as a smaller one has samples
# They take a sample, or a number, out of a batch.
_ONE_SAMPLE = frozenset(
    f"aten::{name}" for name in ("select", "item", "_local_scalar_dense", "is_nonzero")
)
_LAYERS = (*FED, "aten::addmm")


def count_layer_runs(context: StepContext, *, whole_batch: int | None = None) -> float:
    """How often the step runs its layers, at most: once in a plain step. Without the runs that read
    a `whole_batch`."""
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
        if strings[name] not in _LAYERS:
            continue
        # The parameter among the layer's inputs; addmm takes it transposed.
        inputs = [dims for dims in msgspec.json.decode(strings[shapes]) if len(dims) > 1]
        tensors = [dims for dims in inputs if isinstance(dims[0], int)]
        read = tensors[strings[name] == EMBEDDING :]
        if whole_batch and read and read[0][0] % whole_batch == 0:
            continue
        both_ways = (tuple(dims[::step]) for dims in tensors for step in (1, -1))
        weights = next((shape for shape in both_ways if shape in layers), None)
        if weights is not None:
            runs[weights] += count
    return max((count / layers[weights] for weights, count in runs.items()), default=1.0)


def _batch_of_each_call(context: StepContext) -> int | None:
    """The batch, where the model is called once with each: its loops are over time, or refine a
    result, as far as they read whole batches. None where it may be called once for each task."""
    reading = context.batch_reading
    passes = context.calls.micro_batches if context.calls else 1
    return context.batch if reading is not None and reading.calls == passes else None


class GrownLoops(msgspec.Struct, frozen=True, kw_only=True):
    """A step with another batch, between what grows for sure and all that may grow."""

    graph: StepGraph
    doubt: float  # of the step's logarithm, one standard deviation
    assumption: str = ""


def allow_for_loops(context: StepContext, grown: StepGraph, factor: float) -> GrownLoops:
    """Where the step loops, halfway (on a logarithmic scale) to a step whose loops all grow."""
    each_sample = find_calls_of_samples(context)
    if each_sample.any():
        grown = _repeat(context.graph, grown, each_sample, factor)
    before_ns, after_ns = _host_ns(context.graph), _host_ns(grown)
    # What the host's time outside the optimizer would grow by, if all of it grew.
    most_growth = max(1.0, factor * before_ns / after_ns) if after_ns else 1.0
    least, most = step_ns(grown), step_ns(_scale_host(grown, most_growth))
    part = _UNSEEN_ON_CPU if context.on_host else _UNSEEN
    unseen = part * max(0.0, most / least - 1.0)
    if most <= least or factor <= 1.0:
        return GrownLoops(graph=grown, doubt=unseen)
    micro_batches = context.calls.micro_batches if context.calls else 1
    runs = max(count_layer_runs(context, whole_batch=_batch_of_each_call(context)), micro_batches)
    if runs >= MANY_RUNS:
        words = (
            f"the step runs the same layers {runs:,.0f} times. It is unknown whether a larger "
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
    # The host's time outside the optimizer grows until the step is as long as wanted.
    wanted_ns = math.sqrt(least * most)
    middle, low, high = grown, 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        middle = _scale_host(grown, 1 + share * (most_growth - 1))
        low, high = (share, high) if step_ns(middle) < wanted_ns else (low, share)
    return GrownLoops(
        graph=middle,
        doubt=math.hypot(unseen, math.log(most / least) / 2 / NORMAL_95),
        assumption=words,
    )


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

    def holds_multiple(dims: Any) -> bool:
        if isinstance(dims, int):
            return dims > 0 and dims % batch == 0
        return any(map(holds_multiple, dims))

    return holds_multiple(msgspec.json.decode(shapes))


def _repeat(before: StepGraph, grown: StepGraph, chosen: Flags, factor: float) -> StepGraph:
    """These calls come `factor` times as often: all their time, and the time before each, grows."""
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
    return _loading_ns(context)


def _loading_ns(context: StepContext) -> float:
    """Of a step: inside the data loader."""
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
    between = float(calls.gap_ns[(calls.phase != Phase.OPTIMIZER) & ~each_sample].sum())
    run = context.analysis.run
    if run is None or run.own_python is None:
        return between / 2
    own = run.own_python.share * step_ns(context.graph)
    return min(between, max(0.0, own - float(calls.gap_ns[each_sample].sum())))


def _host_ns(graph: StepGraph) -> float:
    """Outside the optimizer."""
    calls = graph.calls
    chosen = calls.phase != Phase.OPTIMIZER
    return float((calls.gap_ns + calls.call_ns)[chosen].sum() + graph.end_ns)


def _scale_host(graph: StepGraph, by: float) -> StepGraph:
    """The host's time outside the optimizer."""
    scaled = scale_calls(graph, graph.calls.phase != Phase.OPTIMIZER, by)
    return replace(scaled, end_ns=graph.end_ns * by)
