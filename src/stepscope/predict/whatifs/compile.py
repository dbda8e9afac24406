"""compile: what torch.compile might save. A bounded guess: what it will fuse is not known.

compile=reduce-overhead also launches the forward and the backward pass as one CUDA graph each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.graph import Phase
from stepscope.predict.declaration import ApplyStage, WhatIf
from stepscope.predict.edit import scale_calls
from stepscope.predict.kernels import FLOOR_NS, Family
from stepscope.predict.outcome import Outcome, Refused, WrongValue, changed
from stepscope.predict.peaks import peak_of
from stepscope.predict.unknown_operators import find_unknown, require_operators
from stepscope.predict.whatifs.cuda_graphs import LAUNCH_NS, PER_NODE_NS
from stepscope.records.figures import significant

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags, StepGraph
    from stepscope.predict.step_context import StepContext

# GPT-2 small on an H200: elementwise and norm kernels took 0.4 of their eager time, the host 0.7.
_FUSED, _HOST = 0.45, 0.7
_GRAPHED = "reduce-overhead"
_MODES = ("default", _GRAPHED, "max-autotune-no-cudagraphs")  # the last: products are not guessed


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses a step that is compiled already."""
    if value and value not in _MODES:
        raise WrongValue(f"compile={value}: choose one of {', '.join(_MODES)}")
    names = context.trace.strings
    if any(name.startswith(("triton_", "## Call CompiledFxGraph")) for name in names):
        raise Refused("compile: the step is compiled already")
    if context.on_host:
        raise Refused("compile: the trace has no accelerator; a CPU's gain is not known")
    graph = context.graph
    phase = context.task_phase
    fusible = (context.operators.family == Family.OTHER) & (
        (phase == Phase.FORWARD) | (phase == Phase.BACKWARD)
    )
    require_operators(context, "compile")
    dur = graph.tasks.dur_ns
    fusible &= ~find_unknown(context)
    if not fusible.any():
        raise Refused("compile: there is nothing to fuse")
    start = np.minimum(dur, FLOOR_NS * 0.5)
    fused_ns = np.where(fusible, start + (dur - start) * _FUSED, dur)
    graph = replace(graph, tasks=replace(graph.tasks, dur_ns=fused_ns))
    passes = (graph.calls.phase == Phase.FORWARD) | (graph.calls.phase == Phase.BACKWARD)
    host = _HOST if value != _GRAPHED else min(_HOST, _graphed_host(graph, passes))
    assumptions = [
        f"a guess: elementwise work and norms fuse to {_FUSED} of their time, the host's calls "
        f"to {significant(host)}, as with GPT-2 small on an H200; graph breaks and recompilation "
        "take that away"
    ]
    if value == _GRAPHED:
        assumptions.append(
            "forward and backward are one CUDA graph each: shapes stay the same, and nothing in "
            "them waits for the device"
        )
    after = replace(
        changed(context, scale_calls(graph, passes, host)),
        memory_change=replace(context.memory_change, fuse=True),
    )
    return Outcome(context=after, assumptions=tuple(assumptions), spread=0.3, peak=peak_of(after))


def _graphed_host(graph: StepGraph, passes: Flags) -> float:
    """What is left of the host's time for both passes when each is launched as a graph."""
    now_ns = float((graph.calls.gap_ns + graph.calls.call_ns)[passes].sum())
    kernels = int(passes[graph.tasks.call].sum())
    return (2 * LAUNCH_NS + PER_NODE_NS * kernels) / now_ns if now_ns > 0 else 1.0


def _label(value: str) -> str:
    return f"torch.compile ({value})" if value else "torch.compile"


WHATIF = WhatIf(
    name="compile",
    help="torch.compile: a guess between bounds, and marked as one",
    label=_label,
    stage=ApplyStage.FUSE,
    apply=apply,
    value_is_optional=True,
    usual=("",),
    joins_peak=True,
    needs_ceilings=False,
    remedies={"compile": ("",)},
)
