"""A step with more samples or fewer: kernels grow by their shapes, host time stays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.call_tree import distinct_places
from stepscope.explain.replay.graph import Phase
from stepscope.predict.kernels import FLOOR_NS, Family
from stepscope.predict.outcome import Outcome, Refused, changed
from stepscope.predict.peaks import peak_at_batch

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags, Floats
    from stepscope.predict.step_context import StepContext

SPREAD = 0.05
_TAIL = 0.4  # of a wave of blocks: what the last one leaves idle


def grow_batch(context: StepContext, factor: float) -> Outcome:
    """The step with `factor` times the samples."""
    if context.on_host:
        raise Refused("batch: the trace has no accelerator; how a CPU's time grows is not known")
    growing = find_growing_tasks(context)
    if not growing.any():
        raise Refused("batch: no task's shapes depend on the batch")
    tasks = context.graph.tasks
    dur_ns = np.where(growing, _grown_ns(context, factor), tasks.dur_ns)
    graph = replace(context.graph, tasks=replace(tasks, dur_ns=dur_ns))
    change = (
        f"{context.batch} -> {round(context.batch * factor)}" if context.batch else f"x{factor:g}"
    )
    return Outcome(
        context=replace(
            changed(context, graph),
            batch=round(context.batch * factor) if context.batch else None,
            grown=context.grown * factor,
        ),
        assumptions=(
            f"batch {change}: {int(growing.sum()):,} of {len(tasks):,} tasks grow with it; the "
            "host's time and the optimizer stay",
            "a kernel grows only once it fills the device",
        ),
        spread=SPREAD,
        samples=factor,
        peak=peak_at_batch(context, context.grown * factor),
    )


def find_growing_tasks(context: StepContext) -> Flags:
    """Tasks of forward and backward that touch anything besides parameters."""
    phase = context.task_phase
    in_pass = (phase == Phase.FORWARD) | (phase == Phase.BACKWARD) | (phase == Phase.DATA)
    known = set(context.parameters.shapes) if context.parameters else set()
    known |= {shape[::-1] for shape in known}
    row, strings = context.operators.row, context.trace.strings
    codes = np.full(len(row), -1, np.int32)
    with_shapes = in_pass & (row >= 0)
    codes[with_shapes] = context.trace.host.shapes[row[with_shapes]]
    distinct, place = distinct_places(codes)
    others = [code < 0 or not _all_in(strings[code], known) for code in distinct.tolist()]
    growing: Flags = in_pass & np.array(others, np.bool_)[place]
    return growing


def _all_in(text: str, known: set[tuple[int, ...]]) -> bool:
    try:
        arguments = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    shapes = [tuple(dims) for dims in arguments if isinstance(dims, list) and dims]
    flat = [shape for shape in shapes if all(isinstance(size, int) for size in shape)]
    return bool(flat) and len(flat) == len(shapes) and all(shape in known for shape in flat)


def _grown_ns(context: StepContext, factor: float) -> Floats:
    """A start-up that stays, and a rest that grows.

    Products grow with the number of waves of blocks that the device has to run. Other kernels move
    bytes, or their blocks loop over the samples (batch norms, and gradients of weights).
    """
    tasks = context.graph.tasks
    blocks = task_blocks(context) * context.grown
    wave = float(context.multiprocessors)
    before = np.maximum(1.0, blocks / wave + _TAIL)
    after = np.maximum(1.0, blocks * factor / wave + _TAIL)
    product = (
        (blocks > 0) & (context.operators.family != Family.OTHER) & ~_find_weight_gradients(context)
    )
    growth = np.where(product, after / before, factor)
    start = np.minimum(tasks.dur_ns, FLOOR_NS)
    grown: Floats = start + (tasks.dur_ns - start) * growth
    return grown


def _find_weight_gradients(context: StepContext) -> Flags:
    """Convolutions' gradients of weights, which their kernels' names reveal."""
    rows, names, strings = context.graph.tasks.row, context.trace.device.name, context.trace.strings
    codes = np.where(rows >= 0, names[np.maximum(rows, 0)], -1) if len(names) else rows
    distinct, place = distinct_places(codes)
    by_name = [code >= 0 and "wgrad" in strings[code] for code in distinct.tolist()]
    return np.array(by_name, np.bool_)[place]


def task_blocks(context: StepContext) -> Floats:
    """Thread blocks of each task's kernel as traced, 0 if the trace does not say."""
    device, strings = context.trace.device, context.trace.strings
    if not len(device):
        return np.zeros(len(context.graph.tasks))
    rows = context.graph.tasks.row
    codes = np.where(rows >= 0, device.grid[np.maximum(rows, 0)], -1)
    distinct, place = distinct_places(codes)
    counts = [_count_blocks(strings[code]) if code >= 0 else 0.0 for code in distinct.tolist()]
    return np.array(counts)[place]


def _count_blocks(text: str) -> float:
    try:
        return float(math.prod(msgspec.json.decode(text, type=list[int])))
    except msgspec.DecodeError:
        return 0.0
