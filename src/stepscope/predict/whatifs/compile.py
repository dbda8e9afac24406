"""compile: what torch.compile saves, by fusing the eager step's operators along their data.

Loops between library calls become one kernel each, which moves its bytes once.
compile=reduce-overhead and max-autotune also launch each pass as one CUDA graph; that is also
answered for a step that is compiled already. The optimizer stays as it is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.predict.compiled_step import (
    UNKNOWN_SHARE,
    CompiledStep,
    HostTimes,
    compile_step,
    find_compiled_launches,
    find_plain_attention,
    is_paced_by_host,
    launch_as_graphs,
    relaunch,
)
from stepscope.predict.declaration import (
    NothingToChange,
    Outcome,
    Refused,
    WrongValue,
    changed,
    find_unknown,
    require_operators,
)
from stepscope.predict.fused_loops import is_alone
from stepscope.predict.kernel_costs import FLOOR_NS, Family
from stepscope.predict.peaks import peak_of
from stepscope.predict.step_context import StepContext, is_compiled
from stepscope.step.call_tree import by_text
from stepscope.step.graph import CallKind, Phase
from stepscope.step.replay import step_ns
from stepscope.text.figures import duration, percent, size
from stepscope.text.words import counted
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from stepscope.step.graph import Flags

_GRAPHED = ("reduce-overhead", "max-autotune")
_TUNED = ("max-autotune", "max-autotune-no-cudagraphs")
_MODES = ("default", *_GRAPHED, "max-autotune-no-cudagraphs")
_SPREAD, _GUESSED = 0.16, 0.3  # of the change: along shapes, and without them
# Products and convolutions may get other kernels, as their neighbours' layouts change.
_LIBRARY_DOUBT = 0.04
# Of what a mask adds to causal attention: not every library passes one.
_MASKED_DOUBT = 0.4
# Of other attention's time: with a mask it may run as single operators. ViT's took four times as
# long then, Whisper's stayed as it was.
_UNFUSED_DOUBT = 1.0
_WORTH_SAYING = 0.05  # of the device's time
_NO_GAIN = 0.95  # of the step: above, compiling is not worth its time
# Of 35 compiled steps on an H200, 32 were within a tenth of this as CUDA graphs, 25 within 2%.
_TOGETHER_DOUBT = 0.05
_NOT_TUNED = "matmuls take as long as now: the gain of autotuning is unknown"
_TUNED_DOUBT = 0.03  # other kernels for products: rarely slower, seldom much faster


def predict(context: StepContext, value: str) -> Outcome:
    """Of a step that is compiled already, only its graphs can become CUDA graphs."""
    if value and value not in _MODES:
        raise WrongValue(f"compile={value}: choose one of {', '.join(_MODES)}")
    if is_compiled(context):
        return _launch_together(context, value)
    if context.on_host:
        raise Refused("compile: the trace has no GPU, and the gain on a CPU is unknown")
    require_operators(context, "compile")
    compiled = compile_step(context)
    guessed = _find_guessed(context, compiled)
    if not compiled.by_shapes.any() and not guessed.any():
        raise NothingToChange("compile: the step has nothing to fuse")
    compiled = _guess(compiled, guessed)
    times = relaunch(context, compiled, graphed=value in _GRAPHED)
    known_ns = context.graph.tasks.dur_ns
    guessed_share = float(known_ns[guessed].sum()) / float(
        known_ns[guessed | compiled.by_shapes].sum()
    )
    paced_by_host = is_paced_by_host(times.graph)
    after = replace(
        changed(context, times.graph), memory_change=replace(context.memory_change, fuse=True)
    )
    return Outcome(
        context=after,
        peak=peak_of(after),
        assumptions=tuple(_assume(context, compiled, times, value, guessed_share)),
        spread=_SPREAD + (_GUESSED - _SPREAD) * guessed_share,
        doubt=math.hypot(
            _LIBRARY_DOUBT,
            _TUNED_DOUBT if value in _TUNED else 0.0,
            times.doubt,
            _MASKED_DOUBT * _lengthened(context, compiled),
            0.0 if paced_by_host else _UNFUSED_DOUBT * _plain_attention(context, compiled),
        ),
    )


def _launch_together(context: StepContext, value: str) -> Outcome:
    if value not in _GRAPHED:
        raise NothingToChange("compile: the step is compiled already")
    launches = find_compiled_launches(context)
    graphs = len(distinct(context.graph.calls.operator[launches]))
    if not graphs or int(launches.sum()) <= graphs:
        raise NothingToChange(
            f"compile={value}: no compiled code of this step launches kernels one by one"
        )
    assumptions = [
        f"{counted(int(launches.sum()), 'launch', 'launches')} of compiled code become "
        f"{counted(graphs, 'CUDA graph')}. Shapes must stay the same. A graph that changes "
        "its inputs or uses the CPU would not be captured"
    ]
    if value in _TUNED:
        assumptions.append(_NOT_TUNED)
    return Outcome(
        context=changed(context, launch_as_graphs(context, launches)),
        assumptions=tuple(assumptions),
        spread=0.0,
        doubt=math.hypot(_TOGETHER_DOUBT, _TUNED_DOUBT if value in _TUNED else 0.0),
    )


def _find_guessed(context: StepContext, compiled: CompiledStep) -> Flags:
    """Loops without shapes, and tasks that another what-if has added, as casts."""
    phase = context.task_phase
    loops: Flags = (context.operators.family == Family.OTHER) & (
        (phase == Phase.FORWARD) | (phase == Phase.BACKWARD)
    )
    no_shapes = context.operators.bytes_moved < 0
    trace, row = context.trace, context.operators.row
    alone: Flags = by_text(trace, trace.host.name, row, is_alone, False)
    return loops & no_shapes & ~alone & ~compiled.by_shapes & ~find_unknown(context)


def _guess(compiled: CompiledStep, guessed: Flags) -> CompiledStep:
    start = np.minimum(compiled.dur_ns, FLOOR_NS * 0.5)
    shorter = start + (compiled.dur_ns - start) * UNKNOWN_SHARE
    return replace(compiled, dur_ns=np.where(guessed, shorter, compiled.dur_ns))


def _lengthened(context: StepContext, compiled: CompiledStep) -> float:
    """The share of the device's time that compiling adds."""
    after = float(compiled.dur_ns.sum())
    added = float((compiled.dur_ns - context.graph.tasks.dur_ns).clip(0).sum())
    return added / after if after > 0 else 0.0


def _plain_attention(context: StepContext, compiled: CompiledStep) -> float:
    """The share of the device's time in attention to everything, without a mask."""
    after = float(compiled.dur_ns.sum())
    plain = float(compiled.dur_ns[find_plain_attention(context)].sum())
    return plain / after if after > 0 else 0.0


def _assume(
    context: StepContext,
    compiled: CompiledStep,
    times: HostTimes,
    value: str,
    guessed_share: float,
) -> list[str]:
    assumptions = [
        f"{counted(times.launches, 'launch', 'launches')} of both passes become "
        f"{compiled.calls:,} calls. {counted(compiled.fused_loops, 'loop')} fuse their "
        f"neighbors and move {size(compiled.saved_bytes)} less. CPU time falls to "
        f"{percent(times.share)}. Graph breaks and recompilation would reduce the gain"
    ]
    if compiled.channels_last:
        assumptions.append("convolutions keep their tensors in channels-last order")
    if guessed_share > 0.1:
        assumptions.append(
            f"{percent(guessed_share)} of what may fuse has no recorded shapes. It is assumed "
            f"to take {UNKNOWN_SHARE} of its time"
        )
    if value in _GRAPHED:
        assumptions.append(
            "forward and backward become one CUDA graph each. Shapes must stay the same, and "
            "nothing in them may wait for the GPU"
        )
    if value in _TUNED:
        assumptions.append(_NOT_TUNED)
    assumptions += _assume_splits(context, compiled, times)
    if (context.operators.family == Family.RECURRENT).any():
        assumptions.append("recurrent layers stay outside the compiled graphs")
    if value not in _GRAPHED and is_paced_by_host(times.graph):
        assumptions.append(_describe_pace(context, times))
    return assumptions


def _assume_splits(context: StepContext, compiled: CompiledStep, times: HostTimes) -> list[str]:
    """What a compiler cannot see through."""
    assumptions = []
    if times.branches:
        assumptions.append(
            f"{counted(times.branches, 'branch', 'branches')} per step on the value of a "
            "tensor split the compiled graph"
        )
    checks = int(compiled.checks.sum())
    if checks:
        assumptions.append(
            f"{counted(checks, 'check')} of the inputs, which waits for the GPU, disappears. "
            "Causal attention then gets its mask as a tensor and computes what it skips now"
        )
    if _plain_attention(context, compiled) > _WORTH_SAYING:
        assumptions.append(
            "attention stays one fused call. Some libraries pass a mask when they are "
            "compiled and lose it (transformers, for models without a causal mask). Then the "
            "step is slower"
        )
    calls = context.graph.calls
    waits = int(((calls.kind == CallKind.WAIT) & (calls.phase != Phase.OPTIMIZER)).sum()) - checks
    if waits > 0:
        assumptions.append(
            f"{counted(waits, 'blocking call')} per step may break the graph. They are "
            "assumed to stay"
        )
    return assumptions


def _describe_pace(context: StepContext, times: HostTimes) -> str:
    """Why fused kernels alone do not help, and what does."""
    host, device = (duration(ns) for ns in (times.graph.host_ns, times.graph.device_ns))
    ratio = step_ns(times.graph) / max(step_ns(context.graph), 1.0)
    gain = ""
    if ratio * math.exp(2 * times.doubt) > 1:
        does = "does" if ratio > _NO_GAIN else "may"
        gain = f"compile=default {does} not make this step faster: "
    return (
        f"{gain}the compiled step is host-bound. The CPU launches kernels one by one, which "
        f"takes {host}, and the GPU needs {device}. compile=reduce-overhead launches them "
        "together, as CUDA graphs"
    )
