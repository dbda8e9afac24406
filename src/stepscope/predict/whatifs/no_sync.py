"""no-sync: no call blocks; the host runs ahead as far as the launch queue lets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.predict.declaration import NothingToChange, Outcome, changed
from stepscope.step.edit import Selection, remove
from stepscope.step.graph import CallKind
from stepscope.text.words import counted

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext


def apply(context: StepContext, _value: str) -> Outcome:
    """Refuses a step in which nothing waits."""
    if context.on_host:
        raise NothingToChange("no-sync: the trace has no GPU to wait for")
    graph = context.graph
    waiting = graph.calls.kind == CallKind.WAIT
    if not waiting.any():
        raise NothingToChange("no-sync: no call of this step waits for the GPU")
    no_tasks = np.zeros(len(graph.tasks), np.bool_)
    without = remove(graph, Selection(calls=waiting, tasks=no_tasks), with_gaps=False)
    return Outcome(
        context=changed(context, without),
        assumptions=(
            (
                f"{counted(int(waiting.sum()), 'blocking call')} per step removed, everything "
                "else stays the same"
            ),
        ),
        spread=0.05,
    )
