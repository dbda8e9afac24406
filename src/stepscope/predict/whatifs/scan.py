"""scan: backward through time by stepscope.fix.scan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.recurrences import LONG, StepWindow, find_recurrences, owners
from stepscope.explain.replay.schedule import step_ns
from stepscope.predict.declaration import ApplyStage, WhatIf
from stepscope.predict.edit import scale_calls, scale_tasks
from stepscope.predict.outcome import Outcome, Refused, changed
from stepscope.predict.scan_times import is_measured, scan_time
from stepscope.records.figures import duration
from stepscope.records.scan_costs import LARGEST_SIZE, WORTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.recurrences import Recurrence, RecurrentCalls
    from stepscope.explain.replay.graph import Flags, StepGraph
    from stepscope.predict.scan_times import ScanTime
    from stepscope.predict.step_context import StepContext

_HOST_NS = 300e3  # of one layer's launches; a loop makes several for each of its steps
_HORIZON = (
    "the gradient must reach far enough to matter: ask gradient_horizon first. Where only a "
    "few steps matter, truncation is cheaper than any scan"
)


class _ScannedRecurrence(msgspec.Struct, frozen=True, kw_only=True):
    """One recurrence of the step, as it is and as the scan would have it."""

    recurrence: Recurrence
    backward: Flags  # of the graph's tasks, or of a CPU step's calls
    backward_calls: Flags
    now_ns: float
    time: ScanTime

    @property
    def is_worth_it(self) -> bool:
        return self.now_ns > WORTH * self.scanned_ns

    @property
    def scanned_ns(self) -> float:
        """What takes the place of today's backward pass: the scan's forward pass is longer too."""
        return self.time.backward_ns + self.time.forward_ns

    def __str__(self) -> str:
        shape = self.recurrence
        words = (
            f"{shape.steps:,} steps, batch {shape.batch:,}, state of {shape.size:,}: backward "
            f"{duration(self.now_ns)} -> {duration(self.time.backward_ns)}, {self.time.basis}"
        )
        return words if self.is_worth_it else f"not worth it for {words}"


def apply(context: StepContext, _value: str) -> Outcome:
    """Refuses a step without a long recurrence. Where the scan pays for none of them, the step is
    predicted with all scanned: tune must know that it gets longer."""
    found = find_recurrences(context.trace, _window(context))
    changes = [
        change
        for place, calls in enumerate(found)
        if _fits(context, calls.recurrence)
        and (change := _change(context, found, place)) is not None
    ]
    if not changes:
        raise Refused(f"scan: {_why_none([one.recurrence for one in found])}")
    scanned = [change for change in changes if change.is_worth_it] or changes
    graph = context.graph
    for change in scanned:
        graph = _scanned(context, graph, change)
    wrong_ns = sum(change.time.doubt * change.time.backward_ns for change in scanned)
    return Outcome(
        context=changed(context, graph),
        assumptions=(_HORIZON, *map(str, changes)),
        spread=0.0,
        doubt=wrong_ns / max(1.0, step_ns(graph)),
    )


def _window(context: StepContext) -> StepWindow:
    """From the step's first call to the end of its last one, with the operators around them."""
    host, calls = context.trace.host, context.graph.calls
    rows = np.concatenate((calls.row[calls.row >= 0], calls.operator[calls.operator >= 0]))
    if not len(rows):
        return StepWindow(start_ns=0, end_ns=0)
    ends = host.start_ns[rows] + host.dur_ns[rows]
    return StepWindow(start_ns=int(host.start_ns[rows].min()), end_ns=int(ends.max()))


def _fits(context: StepContext, recurrence: Recurrence) -> bool:
    """A gated layer only where the scan was measured: there is no model of its cost."""
    if recurrence.is_plain:
        return context.on_host or recurrence.size <= LARGEST_SIZE
    return recurrence.form == "layer" and is_measured(recurrence, _device(context))


def _device(context: StepContext) -> str | None:
    return None if context.on_host else context.trace.device_name or ""


def _change(
    context: StepContext, found: Sequence[RecurrentCalls], place: int
) -> _ScannedRecurrence | None:
    """None if the step has no backward pass through it."""
    calls, tasks = context.graph.calls, context.graph.tasks
    owner, in_backward = owners(context.trace, found, calls.operator)
    backward_calls = (owner == place) & in_backward
    forward_calls = (owner == place) & ~in_backward
    if context.on_host:
        backward, forward = backward_calls, forward_calls
        item_ns = calls.gap_ns + calls.call_ns
    else:
        backward, forward = backward_calls[tasks.call], forward_calls[tasks.call]
        item_ns = tasks.dur_ns
    now_ns = float(item_ns[backward].sum())
    if now_ns <= 0:
        return None
    recurrence = found[place].recurrence
    time = scan_time(
        recurrence,
        (float(item_ns[forward].sum()), now_ns),
        _device(context),
        context.multiprocessors,
    )
    return _ScannedRecurrence(
        recurrence=recurrence,
        backward=backward,
        backward_calls=backward_calls,
        now_ns=now_ns,
        time=time,
    )


def _scanned(context: StepContext, graph: StepGraph, change: _ScannedRecurrence) -> StepGraph:
    factor = change.scanned_ns / change.now_ns
    if context.on_host:
        return scale_calls(graph, change.backward, factor)
    graph = scale_tasks(graph, change.backward, factor)
    calls = context.graph.calls
    host_ns = float((calls.gap_ns + calls.call_ns)[change.backward_calls].sum())
    target_ns = _HOST_NS * change.recurrence.layers
    if host_ns <= target_ns:
        return graph
    return scale_calls(graph, change.backward_calls, target_ns / host_ns)


def _why_none(found: Sequence[Recurrence]) -> str:
    if any(one.is_plain for one in found):
        return f"states are larger than {LARGEST_SIZE}, or the step has no backward pass"
    if found:
        return (
            "the time of a scan of an LSTM or a GRU of this shape is unknown. Measure it on "
            'the GPU: stepscope.fix.scan.recommend(steps, batch, size, cell="lstm") (or '
            '"gru")'
        )
    return (
        f"no recurrence of {LONG} steps or more was found. Shapes must be recorded "
        "(record_shapes=True, or stepscope run)"
    )


WHATIF = WhatIf(
    name="scan",
    help="backward through recurrent layers in chunks that run at the same time",
    label="scan backward",
    stage=ApplyStage.SCALE,
    apply=apply,
    takes_value=False,
    keeps_peak=True,
    needs_ceilings=False,
)
