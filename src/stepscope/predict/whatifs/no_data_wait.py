"""no-data-wait: every batch is ready when the step needs it."""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.predict.declaration import NothingToChange, Outcome, changed
from stepscope.predict.step_context import StepContext
from stepscope.predict.step_spans import without_waits
from stepscope.text.figures import milliseconds


def apply(context: StepContext, _value: str) -> Outcome:
    """Refuses a trace without data loading, unless the run's other steps stall for data."""
    graph, saved_ns, events = without_waits(context)
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
