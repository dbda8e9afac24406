"""no-sync: blocking calls removed; the host runs ahead as far as the queue lets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.replay.graph import CallKind
from stepscope.predict.edit import Selection, remove
from stepscope.predict.outcome import Outcome, Refused, changed
from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext

HELP = "remove calls that wait for the device (.item(), .cpu(), synchronize)"


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses where nothing waits."""
    del value
    if context.on_host:
        raise Refused("no-sync: the trace has no accelerator to wait for")
    graph = context.graph
    waiting = graph.calls.kind == CallKind.WAIT
    if not waiting.any():
        raise Refused("no-sync: no call of this step waits for the device")
    none = np.zeros(len(graph.tasks), np.bool_)
    new = remove(graph, Selection(calls=waiting, tasks=none), with_gaps=False)
    return Outcome(
        context=changed(context, new),
        assumptions=(
            f"{counted(int(waiting.sum()), 'blocking call')} per step removed, all else as before",
        ),
        spread=0.05,
    )
