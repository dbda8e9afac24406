"""compile: what torch.compile might save. A bounded guess: what it will fuse is not known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.graph import Phase
from stepscope.predict.declaration import ApplyStage, WhatIf
from stepscope.predict.edit import scale_calls
from stepscope.predict.kernels import FLOOR_NS, Family
from stepscope.predict.outcome import Outcome, Refused, changed

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext

# GPT-2 small on an H200: elementwise and norm kernels took 0.4 of their eager time, the host 0.7.
_FUSED, _HOST = 0.45, 0.7


def apply(context: StepContext, _value: str) -> Outcome:
    """Refuses a step that is compiled already."""
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
    # Kernels inside a CUDA graph have no operators, so which of them are products is not known.
    unknown = (graph.tasks.row >= 0) & (context.operators.row < 0)
    dur = graph.tasks.dur_ns
    if dur[unknown].sum() > 0.5 * dur.sum():
        raise Refused("compile: the trace does not say which operators its kernels belong to")
    fusible &= ~unknown
    if not fusible.any():
        raise Refused("compile: there is nothing to fuse")
    start = np.minimum(dur, FLOOR_NS * 0.5)
    fused_ns = np.where(fusible, start + (dur - start) * _FUSED, dur)
    graph = replace(graph, tasks=replace(graph.tasks, dur_ns=fused_ns))
    passes = (graph.calls.phase == Phase.FORWARD) | (graph.calls.phase == Phase.BACKWARD)
    return Outcome(
        context=changed(context, scale_calls(graph, passes, _HOST)),
        assumptions=(
            f"a guess: elementwise work and norms fuse to {_FUSED} of their time, the host's calls "
            f"to {_HOST}, as with GPT-2 small on an H200; graph breaks and recompilation take that "
            "away",
        ),
        spread=0.3,
    )


WHATIF = WhatIf(
    name="compile",
    help="torch.compile: a guess between bounds, and marked as one",
    label="torch.compile",
    stage=ApplyStage.FUSE,
    apply=apply,
    takes_value=False,
    usual=("",),
    needs_ceilings=False,
    remedies={"compile": ("",)},
)
