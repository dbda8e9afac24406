"""fuse=B: so many models of the same program train as one array (stepscope.fix.fuse)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.predict.batch_size import TAIL, task_blocks
from stepscope.predict.declaration import Outcome, Refused, WrongValue
from stepscope.predict.kernel_costs import FLOOR_NS, MEMORY_SHARE, Family, with_durations
from stepscope.predict.peaks import peak_at_batch
from stepscope.predict.stalls import grow_stalls
from stepscope.predict.step_context import StepContext
from stepscope.predict.whatifs import cuda_graphs
from stepscope.records.dtypes import PEAKS
from stepscope.records.prediction import PeakMemory
from stepscope.step.edit import scale_calls
from stepscope.step.replay import step_ns
from stepscope.step.work import Kind
from stepscope.text.figures import duration, percent, size

if TYPE_CHECKING:
    from stepscope.step.graph import Floats

# A step that trains several models as one array: as many launches, each with more work.

# ResNet-18 on an H200, bf16: an array of 4 and one of 8 took 1.20 and 1.25 times the host-bound
# step of one model. Thirty-two with learning rates of their own took 4.9 times, eager: each model's
# optimizer is launched alone, which a captured step does not wait for.
HOST_GROWTH = 1.2
_RESIDENT_PRODUCTS, _RESIDENT_OTHERS = 2, 8  # thread blocks on one multiprocessor
_PRODUCT_SHARE = 0.5  # of the peak: what grouped convolutions and batched products reach
_DOUBT = 0.15  # of the whole step, besides the bounds: grouped kernels are others than one model's
_BUSY = 0.8  # of the step: a device that has no room for others


def fuse_models(context: StepContext, count: int) -> Outcome:
    """Refuses a CPU, and a job of several ranks."""
    if context.on_host or not len(context.graph.tasks):
        raise Refused(
            "fuse: the trace has no GPU, and on a CPU training models together gains little"
        )
    if (context.trace.world_size or 1) > 1 or (context.graph.tasks.kind == Kind.COMM).any():
        raise Refused("fuse: the job has several ranks, but fused models train on one device")
    least, most = _bounds(context, count)
    likely = np.sqrt(least * most)
    host = scale_calls(context.graph, np.ones(len(context.graph.calls), np.bool_), HOST_GROWTH)
    graph = with_durations(host, likely)
    slow, fast = (step_ns(with_durations(host, durations)) for durations in (most, least))
    peak = _peak(context, count)
    return Outcome(
        context=replace(context, graph=graph, stalls=grow_stalls(context.stalls, float(count))),
        assumptions=(
            f"{count} models of one architecture, each with its own batch, need as many "
            f"launches as one. CPU time grows {HOST_GROWTH:g} times. A kernel takes longer "
            "once it fills the GPU",
            "if models have learning rates of their own, the CPU steps them one by one. Then "
            "capture the step (array.graph), or this prediction is too fast",
            *_busy_words(context),
            *_memory_words(context, peak, count),
        ),
        spread=0.0,
        doubt=math.hypot(_DOUBT, math.log(slow / fast) / 4),  # the bounds are two deviations away
        samples=float(count),
        repeats=step_ns(graph) / step_ns(context.graph),
        peak=peak,
    )


def _bounds(context: StepContext, count: int) -> tuple[Floats, Floats]:
    """Each task with the work of `count` models, at least and at most.

    A kernel that does not fill the device takes no longer until it does: with one thread block on
    every multiprocessor at the latest, with as many as can be resident at the earliest. From there
    on it goes on at the rate that it has now. Where the trace does not say its blocks, its FLOPs
    and bytes give the earliest.
    """
    tasks = context.graph.tasks
    blocks = task_blocks(context)
    is_product = context.operators.family != Family.OTHER
    resident = np.where(is_product, _RESIDENT_PRODUCTS, _RESIDENT_OTHERS)
    start = np.minimum(tasks.dur_ns, FLOOR_NS)
    rest = tasks.dur_ns - start
    ideal = count * _ideal_ns(context)

    def grown(per_wave: Floats | float) -> Floats:
        before = np.maximum(1.0, blocks / per_wave + TAIL)
        after = np.maximum(1.0, blocks * count / per_wave + TAIL)
        return start + rest * np.where(blocks > 0, after / before, count)

    most = grown(float(context.multiprocessors))
    earliest = np.where(blocks > 0, grown(context.multiprocessors * resident), tasks.dur_ns)
    known = ((blocks > 0) | (ideal > 0)) & (tasks.kind == Kind.COMPUTE)
    least = np.where(known, np.maximum(earliest, start + np.minimum(ideal, count * rest)), most)
    return np.minimum(least, most), most


def _ideal_ns(context: StepContext) -> Floats:
    """One model's work at the rate of a device that is full; 0 if it is not known."""
    operators, ceilings = context.operators, context.ceilings
    ideal: Floats = np.zeros(len(context.graph.tasks))
    if ceilings is None:
        return ideal
    if ceilings.bytes_s:
        moved = np.maximum(operators.bytes_moved, 0) * operators.share
        ideal = np.maximum(ideal, moved / (MEMORY_SHARE * ceilings.bytes_s) * 1e9)
    for code, dtype in enumerate(PEAKS):
        if peak := ceilings.flops.get(dtype):
            flops = np.where(operators.dtype == code, np.maximum(operators.flops, 0), 0.0)
            ideal = np.maximum(ideal, flops * operators.share / (_PRODUCT_SHARE * peak) * 1e9)
    return ideal


def _busy_words(context: StepContext) -> tuple[str, ...]:
    busy = context.graph.device_ns / max(1.0, step_ns(context.graph))
    if busy < _BUSY:
        return ()
    return (
        f"the GPU is already busy {percent(min(1.0, busy))} of the step, so only kernels that "
        "do not fill it gain",
    )


def _peak(context: StepContext, count: int) -> PeakMemory | None:
    """Nearly all of it is each model's own; what is not, such as workspaces, is in the interval."""
    if context.memory is not None:
        one = PeakMemory(**dict.fromkeys(PeakMemory.__struct_fields__, context.memory.peak_bytes))
    else:
        arithmetic = peak_at_batch(context, context.grown)
        if arithmetic is None:
            return None
        one = arithmetic
    return PeakMemory(
        size_bytes=one.size_bytes * count,
        low_bytes=round(0.85 * one.low_bytes * count),
        high_bytes=round(1.1 * one.high_bytes * count),
    )


def _memory_words(context: StepContext, peak: PeakMemory | None, count: int) -> tuple[str, ...]:
    used = set(context.trace.device.device.tolist())
    room = [one.memory_bytes for one in context.trace.devices if one.id in used]
    if peak is None or not room or room[0] <= 0 or peak.size_bytes <= room[0]:
        return ()
    fitting = room[0] * count // peak.size_bytes
    return (
        f"{count} models need about {size(peak.size_bytes)} and the GPU has {size(room[0])}, "
        f"so about {fitting} fit at a time",
    )


_MOST = 1024
_ALIKE = 1.1  # times a CUDA graph's speed: no reason to fuse


def predict(context: StepContext, value: str) -> Outcome:
    """A step of the array; its samples are those of all models."""
    if not value.isdecimal() or not 2 <= int(value) <= _MOST:
        raise WrongValue(f"fuse={value}: give a number of models from 2 to {_MOST}")
    outcome = fuse_models(context, int(value))
    each_ns = step_ns(outcome.context.graph) / int(value)
    words = f"{duration(each_ns)} for each model's step"
    return replace(
        outcome, assumptions=(words, *outcome.assumptions, *_against_a_graph(context, each_ns))
    )


def _against_a_graph(context: StepContext, each_ns: float) -> tuple[str, ...]:
    """What one model alone would take as a CUDA graph, which is the simpler change."""
    try:
        alone = step_ns(cuda_graphs.predict(context, "").context.graph)
    except Refused:
        return ()
    words = f"one model alone, launched as a CUDA graph, would take {duration(alone)} per step"
    if alone < _ALIKE * each_ns:
        words += ". That is as good as training them together, and simpler"
    return (words,)
