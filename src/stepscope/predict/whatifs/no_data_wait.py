"""no-data-wait: every batch is ready when the step needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.work import DATA_LOADING
from stepscope.predict.declaration import ApplyStage, WhatIf
from stepscope.predict.host_time import shorten_gaps
from stepscope.predict.outcome import Outcome, Refused, changed
from stepscope.records.figures import milliseconds
from stepscope.records.trace import HostKind

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext


def apply(context: StepContext, _value: str) -> Outcome:
    """Refuses a trace without data loading."""
    graph, saved_ns, events = shorten_gaps(context, HostKind.ANNOTATION, DATA_LOADING.search)
    if not events:
        raise Refused("no-data-wait: this trace has no data loading to remove")
    if saved_ns <= 0:
        raise Refused("no-data-wait: the steps of this trace never wait for data")
    return Outcome(
        context=changed(context, graph),
        assumptions=(f"{milliseconds(saved_ns / 1e6)} per step inside the data loader removed",),
        spread=0.05,
    )


WHATIF = WhatIf(
    name="no-data-wait",
    help="batches are ready when the step needs them",
    label="data always ready",
    stage=ApplyStage.STOP_WAITING,
    apply=apply,
    takes_value=False,
    usual=("",),
    is_goal=True,
    keeps_peak=True,
    needs_ceilings=False,
    remedies={"no-data-wait": ("",)},
)
