"""scale=REGEX:FACTOR: kernels (or host events) of that name take FACTOR times as long."""

from __future__ import annotations

import numpy as np

from stepscope.predict.declaration import ApplyStage, Outcome, Refused, WhatIf, WrongValue, changed
from stepscope.predict.step_context import StepContext
from stepscope.predict.step_spans import shorten_gaps
from stepscope.predict.whatifs.remove import compile_pattern
from stepscope.records.trace import HostKind
from stepscope.step import edit
from stepscope.text.words import counted


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses a pattern that matches nothing."""
    names, _, number = value.rpartition(":")
    try:
        factor = float(number)
    except ValueError:
        factor = -1.0
    if not names or factor < 0 or not np.isfinite(factor):
        raise WrongValue(f"scale={value}: write REGEX:FACTOR, such as scale=gemm:0.5")
    matches = compile_pattern(names).search
    chosen = edit.select(context.graph, context.trace, matches)
    if chosen.tasks.any():
        graph = edit.scale_tasks(context.graph, chosen.tasks, factor)
        assumption = (
            f"the time of {counted(int(chosen.tasks.sum()), 'kernel')} is multiplied by {factor:g}"
        )
    else:
        graph, saved_ns, events = shorten_gaps(context, HostKind.PYTHON, matches, factor)
        own = chosen.calls & (graph.calls.call_ns > 0)
        graph = edit.scale_calls(graph, own, factor)
        if not saved_ns and not own.any():
            raise Refused(f"scale={value}: no kernel, operator or annotation has such a name")
        assumption = f"the CPU time of {counted(events, 'event')} is multiplied by {factor:g}"
    return Outcome(context=changed(context, graph), assumptions=(assumption,), spread=0.03)


WHATIF = WhatIf(
    name="scale",
    help="kernels, or else CPU events, whose name matches take FACTOR times as long",
    label="scaling {}",
    stage=ApplyStage.SCALE,
    apply=apply,
    repeatable=True,
    needs_ceilings=False,
)
