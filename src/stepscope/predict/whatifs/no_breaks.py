"""no-breaks: torch.compile traces the lines that split the model, and the graphs become one.

The host's time from one graph to the next disappears, and so do the calls there that wait for the
device: a value that Python reads is the commonest break.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.compiled.summary import find_break_spans
from stepscope.predict.declaration import Outcome, Refused, changed
from stepscope.predict.step_context import StepContext, step_window
from stepscope.predict.step_spans import shorten_spans
from stepscope.step.edit import Selection, remove
from stepscope.step.graph import CallKind
from stepscope.text.figures import milliseconds
from stepscope.text.words import counted

if TYPE_CHECKING:
    from stepscope.step.arrays import Int64s
    from stepscope.step.graph import Flags


def apply(context: StepContext, _value: str) -> Outcome:
    """Refuses a step in which no graph is split."""
    starts, ends = find_break_spans(context.analysis)
    first, last = step_window(context)
    inside = (starts >= first) & (ends <= last)
    starts, ends = starts[inside], ends[inside]
    if not len(starts):
        raise Refused("no-breaks: the trace shows no compiled graph that a break splits")
    graph, saved_ns = shorten_spans(context, starts, ends)
    waiting = _find_waits(context, starts, ends)
    no_tasks = np.zeros(len(graph.tasks), np.bool_)
    graph = remove(graph, Selection(calls=waiting, tasks=no_tasks), with_gaps=False)
    assumptions = [
        f"{counted(len(starts), 'gap')} between graphs closed "
        f"({milliseconds(saved_ns / 1e6)} of CPU time). What the larger graphs would "
        "also fuse is not counted"
    ]
    if waiting.any():
        assumptions.append(
            f"{counted(int(waiting.sum()), 'blocking call')} between graphs removed with them"
        )
    return Outcome(context=changed(context, graph), assumptions=tuple(assumptions), spread=0.2)


def _find_waits(context: StepContext, starts: Int64s, ends: Int64s) -> Flags:
    """Calls between the graphs that wait for the device."""
    calls, host = context.graph.calls, context.trace.host
    waits = np.flatnonzero((calls.kind == CallKind.WAIT) & (calls.row >= 0))
    at = host.start_ns[calls.row[waits]]
    found = np.zeros(len(calls), np.bool_)
    between = (starts[None, :] <= at[:, None]) & (at[:, None] <= ends[None, :])
    found[waits[between.any(axis=1)]] = True
    return found
