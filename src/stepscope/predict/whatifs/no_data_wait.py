"""no-data-wait: every batch is ready when the step needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.explain.replay.measured import scale_host
from stepscope.explain.replay.schedule import step_ns
from stepscope.explain.work import DATA_LOADING
from stepscope.predict.declaration import ApplyStage, WhatIf
from stepscope.predict.host_time import shorten_gaps
from stepscope.predict.outcome import NothingToChange, Outcome, changed
from stepscope.records.figures import milliseconds
from stepscope.records.trace import HostKind

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import StepGraph
    from stepscope.predict.step_context import StepContext


def apply(context: StepContext, _value: str) -> Outcome:
    """Refuses a trace without data loading, unless the run's other steps stall for data."""
    graph, saved_ns, events = _without_waits(context)
    stalls = context.stalls
    stalled_ns = stalls.cost_ns.get("data", 0.0) if stalls else 0.0
    if not events and not stalled_ns:
        raise NothingToChange("no-data-wait: this trace has no data loading to remove")
    if saved_ns + stalled_ns <= 0:
        raise NothingToChange("no-data-wait: the steps of this trace never wait for data")
    assumptions = []
    if saved_ns > 0:
        inside = milliseconds(saved_ns / 1e6)
        assumptions.append(f"{inside} per step inside the data loader removed")
    if stalled_ns:
        assumptions.append(f"{milliseconds(stalled_ns / 1e6)} per step of data stalls removed")
    return Outcome(
        context=replace(
            changed(context, graph), stalls=stalls.without(("data",)) if stalls else None
        ),
        assumptions=tuple(assumptions),
        spread=0.05,
    )


def _without_waits(context: StepContext) -> tuple[StepGraph, float, int]:
    """The typical step without its waits, what that saves, and how many there were.

    A window that recorded a stall shows a longer wait than a typical step has, and a lucky one a
    shorter wait: the run knows it. On a device a longer wait may be hidden behind queued work.
    """
    waits = (HostKind.ANNOTATION, DATA_LOADING.search)
    graph, saved_ns, events = shorten_gaps(context, *waits)
    measured = context.analysis.measured
    typical_ns = measured.data_ns if measured else None
    if typical_ns is not None and saved_ns > typical_ns:
        return shorten_gaps(context, *waits, 1 - typical_ns / saved_ns)
    whole_ns = step_ns(context.graph)
    if typical_ns is not None and graph.on_host and saved_ns < typical_ns < whole_ns:
        rest = scale_host(graph, (whole_ns - typical_ns) / (whole_ns - saved_ns))
        return rest, float(typical_ns), max(1, events)
    return graph, saved_ns, events


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
