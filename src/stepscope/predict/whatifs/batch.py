"""batch=N (or batch=x2): more samples a step. Kernels grow by their shapes, host time stays."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.call_tree import distinct_places
from stepscope.explain.replay.graph import Phase
from stepscope.predict.kernels import FLOOR_NS, Family
from stepscope.predict.peaks import peak_at_batch
from stepscope.predict.whatifs.outcome import Outcome, Refused, WrongValue, changed

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags, Floats
    from stepscope.predict.step_context import StepContext

HELP = "another batch size, as a number or a factor (x2)"
SPREAD = 0.05
_TAIL = 0.4  # of a wave: what the last one leaves idle
_FACTOR = re.compile(r"^x(\d+(?:\.\d+)?)$")


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses where the batch of the trace is not known and a number was asked for."""
    return grow(context, batch_factor(context, value))


def grow(context: StepContext, factor: float) -> Outcome:
    """So many times the samples."""
    if context.on_host:
        raise Refused("batch: the trace has no accelerator; how a CPU's time grows is not known")
    scales = scaling_tasks(context)
    if not scales.any():
        raise Refused("batch: no task's shapes depend on the batch")
    tasks = context.graph.tasks
    new = np.where(scales, _grown(context, factor), tasks.dur_ns)
    graph = replace(context.graph, tasks=replace(tasks, dur_ns=new))
    known = (
        f"{context.batch} -> {round(context.batch * factor)}" if context.batch else f"x{factor:g}"
    )
    return Outcome(
        context=replace(
            changed(context, graph),
            batch=round(context.batch * factor) if context.batch else None,
            grown=context.grown * factor,
        ),
        assumptions=(
            f"batch {known}: {int(scales.sum())} of {len(tasks)} tasks grow with it, the host's "
            "time and the optimizer stay",
            "a kernel that does not fill the device grows only once it does",
        ),
        spread=SPREAD,
        samples=factor,
        peak=peak_at_batch(context, context.grown * factor),
    )


def batch_factor(context: StepContext, value: str) -> float:
    """New batch over old."""
    match = _FACTOR.match(value)
    if match and float(match[1]) > 0:
        return float(match[1])
    try:
        wanted = int(value)
    except ValueError:
        raise WrongValue(
            f"batch={value}: give a number of samples, or a factor such as x2"
        ) from None
    if wanted < 1:
        raise WrongValue(f"batch={value}: at least one sample")
    if not context.batch:
        raise Refused(f"batch={value}: the batch is not in the trace; give a factor such as x2")
    return wanted / context.batch


def scaling_tasks(context: StepContext) -> Flags:
    """Tasks of forward and backward that touch something besides parameters."""
    phase = context.task_phase
    in_pass = (phase == Phase.FORWARD) | (phase == Phase.BACKWARD) | (phase == Phase.DATA)
    known = set(context.parameters.shapes) if context.parameters else set()
    known |= {shape[::-1] for shape in known}
    row, strings = context.operators.row, context.trace.strings
    codes = np.full(len(row), -1, np.int32)
    told = in_pass & (row >= 0)
    codes[told] = context.trace.host.shapes[row[told]]
    distinct, of = distinct_places(codes)
    others = [code < 0 or not _all_in(strings[code], known) for code in distinct.tolist()]
    found: Flags = in_pass & np.array(others, np.bool_)[of]
    return found


def _all_in(text: str, known: set[tuple[int, ...]]) -> bool:
    try:
        told = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    shapes = [tuple(each) for each in told if isinstance(each, list) and each]
    flat = [s for s in shapes if all(isinstance(size, int) for size in s)]
    return bool(flat) and len(flat) == len(shapes) and all(shape in known for shape in flat)


def _grown(context: StepContext, factor: float) -> Floats:
    """A start-up that stays, and the rest: of products by how many waves of blocks the device has
    to run; other kernels move bytes, or have their blocks loop over the samples (batch norms, and
    products whose result is a weight's gradient)."""
    tasks = context.graph.tasks
    blocks = task_blocks(context) * context.grown
    wave = float(context.multiprocessors)
    before = np.maximum(1.0, blocks / wave + _TAIL)
    after = np.maximum(1.0, blocks * factor / wave + _TAIL)
    product = (blocks > 0) & (context.operators.family != Family.OTHER) & ~_over_samples(context)
    growth = np.where(product, after / before, factor)
    start = np.minimum(tasks.dur_ns, FLOOR_NS)
    found: Floats = start + (tasks.dur_ns - start) * growth
    return found


def _over_samples(context: StepContext) -> Flags:
    """Convolutions' gradients of weights, by their kernels' names, which say so."""
    rows, names, strings = context.graph.tasks.row, context.trace.device.name, context.trace.strings
    codes = np.where(rows >= 0, names[np.maximum(rows, 0)], -1) if len(names) else rows
    distinct, of = distinct_places(codes)
    found = [code >= 0 and "wgrad" in strings[code] for code in distinct.tolist()]
    return np.array(found, np.bool_)[of]


def task_blocks(context: StepContext) -> Floats:
    """Thread blocks of every task's kernel as traced, 0 where the trace does not say."""
    device, strings = context.trace.device, context.trace.strings
    if not len(device):
        return np.zeros(len(context.graph.tasks))
    rows = context.graph.tasks.row
    codes = np.where(rows >= 0, device.grid[np.maximum(rows, 0)], -1)
    distinct, of = distinct_places(codes)
    sizes = [_blocks(strings[code]) if code >= 0 else 0.0 for code in distinct.tolist()]
    return np.array(sizes)[of]


def _blocks(text: str) -> float:
    try:
        return float(math.prod(msgspec.json.decode(text, type=list[int])))
    except msgspec.DecodeError:
        return 0.0
