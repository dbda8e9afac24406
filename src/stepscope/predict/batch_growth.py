"""A step with more samples or fewer: kernels grow by their shapes, host time stays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.graph import Phase
from stepscope.predict.batch_loops import allow_for_loops
from stepscope.predict.by_text import by_text, tensor_shapes
from stepscope.predict.host_batch import HOST_SPREAD, grow_on_host
from stepscope.predict.kernels import FLOOR_NS, Family
from stepscope.predict.outcome import Outcome, Refused
from stepscope.predict.peaks import peak_at_batch
from stepscope.predict.probed_step import find_probed_batch
from stepscope.predict.sample_convolutions import find_sample_convolutions
from stepscope.predict.side_streams import retime
from stepscope.predict.stalls import PER_SAMPLES, grow_stalls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.explain.replay.graph import Flags, Floats, StepGraph
    from stepscope.predict.batch_loops import GrownLoops
    from stepscope.predict.probed_step import ProbedStep
    from stepscope.predict.step_context import StepContext

SPREAD = 0.05
TAIL = 0.4  # of a wave of blocks: what the last one leaves idle
_HALF_BLOCKS = 1.15  # smaller blocks read their inputs more often
# One deviation of the logarithm: recurrent layers multiply as many rows as there are samples, and
# libraries have other kernels for other numbers of rows. Measured once: 18% too low.
_RECURRENT_DOUBT = 0.12
# The same for convolutions that sum over the samples: cuDNN chooses their algorithm by shapes that
# few models have. Measured once: 40% too low.
_SAMPLES_DOUBT = 0.4


def grow_batch(context: StepContext, factor: float) -> Outcome:
    if context.on_host:
        return _grow_step_on_host(context, factor)
    growing = find_growing_tasks(context)
    if not growing.any():
        raise Refused("batch: no kernel's shapes depend on the batch")
    tasks = context.graph.tasks
    dur_ns = np.where(growing, _grown_ns(context, factor), tasks.dur_ns)
    probed, _ = find_probed_batch(context, factor)
    if probed:
        dur_ns = np.where(growing & probed.known, tasks.dur_ns * probed.factor, dur_ns)
    loops = allow_for_loops(context, retime(context.graph, dur_ns, context.operators.row), factor)
    return Outcome(
        context=_with_batch(context, loops.graph, factor),
        assumptions=(
            f"batch {_describe(context, factor)}: {int(growing.sum()):,} of {len(tasks):,} "
            "kernels and copies grow with it. CPU time and the optimizer stay the same",
            *_said(loops),
            "a kernel takes longer only once it fills the GPU",
            *((probed.describe("modelled"),) if probed else ()),
            *_describe_stalls(context, factor),
        ),
        spread=SPREAD * (probed.modelled_share if probed else 1.0),
        doubt=math.hypot(
            _known_doubt(probed), _algorithms_doubt(context, dur_ns, probed), loops.doubt
        ),
        samples=factor,
        peak=peak_at_batch(context, context.grown * factor),
    )


def _grow_step_on_host(context: StepContext, factor: float) -> Outcome:
    graph, growing = grow_on_host(context, factor)
    probed, _ = find_probed_batch(context, factor)
    if probed:
        calls, before = graph.calls, context.graph.calls
        grows = probed.known & (calls.call_ns != before.call_ns)
        call_ns = np.where(grows, before.call_ns * probed.factor, calls.call_ns)
        graph = replace(graph, calls=replace(calls, call_ns=call_ns))
    loops = allow_for_loops(context, graph, factor)
    return Outcome(
        context=_with_batch(context, loops.graph, factor),
        assumptions=(
            f"batch {_describe(context, factor)}: {growing:,} of {len(graph.calls):,} "
            "operators grow with it. Python's time and the optimizer stay the same",
            *_said(loops),
            "reading a matmul's weights takes the same time. Everything else grows with the batch",
            *((probed.describe("modelled"),) if probed else ()),
            *_describe_stalls(context, factor),
        ),
        spread=HOST_SPREAD * (probed.modelled_share if probed else 1.0),
        doubt=math.hypot(_known_doubt(probed), loops.doubt),
        samples=factor,
        peak=peak_at_batch(context, context.grown * factor),
    )


def _with_batch(context: StepContext, graph: StepGraph, factor: float) -> StepContext:
    return replace(
        context,
        graph=graph,
        batch=round(context.batch * factor) if context.batch else None,
        grown=context.grown * factor,
        stalls=grow_stalls(context.stalls, factor),
    )


def _describe(context: StepContext, factor: float) -> str:
    """The batch before and after, or the factor where it is not known."""
    if not context.batch:
        return f"x{factor:g}"
    return f"{context.batch} -> {round(context.batch * factor)}"


def _said(loops: GrownLoops) -> tuple[str, ...]:
    return (loops.assumption,) if loops.assumption else ()


def _known_doubt(probed: ProbedStep | None) -> float:
    return probed.error * (1.0 - probed.modelled_share) if probed else 0.0


def _algorithms_doubt(context: StepContext, dur_ns: Floats, probed: ProbedStep | None) -> float:
    """By the shares of the device's time whose algorithms change with the batch, as far as they
    were not probed."""
    modelled = ~probed.known if probed else np.ones(len(dur_ns), np.bool_)
    recurrent = modelled & (context.operators.family == Family.RECURRENT)
    samples = modelled & find_sample_convolutions(context)
    weighted = _RECURRENT_DOUBT * float(dur_ns[recurrent].sum())
    weighted += _SAMPLES_DOUBT * float(dur_ns[samples].sum())
    return weighted / max(1.0, float(dur_ns.sum()))


def _describe_stalls(context: StepContext, factor: float) -> Iterator[str]:
    stalls = context.stalls
    if stalls is not None and stalls.cost_ns.get("data"):
        yield f"data stalls grow {factor:g} times: the loader needs that much longer for a batch"
    if stalls is not None and stalls.by_count(PER_SAMPLES):
        yield (
            "evaluation and rollouts may come after as many steps or after as many samples "
            "as now. The interval covers both"
        )


def find_growing_tasks(context: StepContext) -> Flags:
    """Tasks of forward and backward that touch anything besides parameters."""
    phase = context.task_phase
    in_pass = (phase == Phase.FORWARD) | (phase == Phase.BACKWARD) | (phase == Phase.DATA)
    known = set(context.parameters.shapes) if context.parameters else set()
    known |= {shape[::-1] for shape in known}

    def has_others(shapes: str) -> bool:
        return not _all_in(shapes, known)

    rows = np.where(in_pass, context.operators.row, -1)
    growing: Flags = in_pass & by_text(
        context.trace, context.trace.host.shapes, rows, has_others, True
    )
    return growing


def _all_in(text: str, known: set[tuple[int, ...]]) -> bool:
    """Whether all tensors are parameters; a list of tensors is none."""
    shapes = [dims for dims in msgspec.json.decode(text) if dims]
    lists = any(isinstance(shape[0], list) for shape in shapes)
    return bool(shapes) and not lists and known.issuperset(map(tuple, shapes))


def _grown_ns(context: StepContext, factor: float) -> Floats:
    """A start-up that stays, and a rest that grows.

    Products grow with the number of waves of blocks that the device has to run. Other kernels move
    bytes, or their blocks loop over the samples (batch norms, and gradients of weights).
    """
    tasks = context.graph.tasks
    blocks = task_blocks(context)
    before, after = (
        _product_time(context, blocks, grown) for grown in (context.grown, context.grown * factor)
    )
    product = (
        (blocks > 0) & (context.operators.family != Family.OTHER) & ~_find_weight_gradients(context)
    )
    growth = np.where(product, after / before, factor)
    start = np.minimum(tasks.dur_ns, FLOOR_NS)
    grown: Floats = start + (tasks.dur_ns - start) * growth
    return grown


def _product_time(context: StepContext, blocks: Floats, grown: float) -> Floats:
    """In waves of the traced `blocks`, for `grown` times the traced samples.

    Where fewer samples leave the device partly idle, a library takes blocks of half the size. They
    cost more: with the traced samples it did not take them.
    """
    waves = float(context.multiprocessors)

    def time(many: Floats) -> Floats:
        whole: Floats = np.maximum(1.0, many / waves + TAIL)
        return whole

    as_traced = time(grown * blocks)
    if grown >= 1.0:
        return as_traced
    dearer = np.maximum(_HALF_BLOCKS, 2.0 * time(blocks) / time(2.0 * blocks))
    smaller: Floats = np.minimum(as_traced, dearer * time(2.0 * grown * blocks) / 2.0)
    return smaller


def _find_weight_gradients(context: StepContext) -> Flags:
    """Products that sum over the samples: their blocks are as many with any batch, and each takes
    longer. Kernels' names reveal those of convolutions, except in the backward of a backward;
    others return a parameter's shape."""
    trace, rows = context.trace, context.graph.tasks.row
    found = by_text(trace, trace.device.name, rows, lambda name: "wgrad" in name, False)
    known = set(context.parameters.shapes) if context.parameters else set()
    known |= {shape[::-1] for shape in known}

    def returns_parameter(shapes: str) -> bool:
        matrices = [shape for shape in tensor_shapes(shapes) if len(shape) == 2]
        return len(matrices) == 2 and (matrices[0][0], matrices[1][1]) in known

    operators = context.operators
    backward = context.task_phase == Phase.BACKWARD
    matmul = np.where(backward & (operators.family == Family.MATMUL), operators.row, -1)
    by_result: Flags = by_text(trace, trace.host.shapes, matmul, returns_parameter, False)
    return found | by_result | find_sample_convolutions(context)


def task_blocks(context: StepContext) -> Floats:
    """Thread blocks of each task's kernel as traced, 0 if the trace does not say."""

    def count(grid: str) -> float:
        return float(math.prod(msgspec.json.decode(grid)))

    return by_text(context.trace, context.trace.device.grid, context.graph.tasks.row, count, 0.0)
