"""scale=REGEX:FACTOR: kernels of these names so many times as long, host events too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.work import rows_named
from stepscope.predict import edit
from stepscope.predict.host_time import shorten_gaps
from stepscope.predict.outcome import Outcome, Refused, WrongValue, changed
from stepscope.predict.whatifs.remove import pattern
from stepscope.records.trace import HostKind
from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext

HELP = "kernels (or, where none matches, host events) FACTOR times as long"


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses a pattern that matches nothing and a factor that is none."""
    names, _, number = value.rpartition(":")
    try:
        factor = float(number)
    except ValueError:
        factor = -1.0
    if not names or factor < 0 or not np.isfinite(factor):
        raise WrongValue(f"scale={value}: write REGEX:FACTOR, such as scale=gemm:0.5")
    matches = pattern(names).search
    chosen = edit.select(context.graph, context.trace, matches)
    if chosen.tasks.any():
        graph = edit.scale_tasks(context.graph, chosen.tasks, factor)
        said = f"duration of {counted(int(chosen.tasks.sum()), 'kernel')} times {factor:g}"
    else:
        host = context.trace.host
        rows = np.flatnonzero(
            rows_named(context.trace, host, host.kind <= HostKind.PYTHON, matches)
        )
        graph, saved = shorten_gaps(context, rows, factor)
        own = chosen.calls & (graph.calls.call_ns > 0)
        graph = edit.scale_calls(graph, own, factor)
        if not saved and not own.any():
            raise Refused(f"scale={value}: no kernel, operator or annotation has such a name")
        said = f"host time of {counted(len(rows), 'event')} times {factor:g}"
    return Outcome(context=changed(context, graph), assumptions=(said,), spread=0.03)
