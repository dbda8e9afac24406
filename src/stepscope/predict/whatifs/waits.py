"""What waits: blocking calls, batches, graph breaks and stalls, each gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.compiled.summary import find_break_spans
from stepscope.predict.declaration import NothingToChange, Outcome, Refused, WrongValue, changed
from stepscope.predict.stalls import name_cause
from stepscope.predict.step_context import StepContext, step_window
from stepscope.predict.step_spans import shorten_spans, without_waits
from stepscope.records.run import STALL_CAUSES
from stepscope.step.edit import Selection, remove
from stepscope.step.graph import CallKind
from stepscope.text.figures import milliseconds
from stepscope.text.words import counted

if TYPE_CHECKING:
    from stepscope.step.arrays import Int64s
    from stepscope.step.graph import Flags


# no-sync: no call blocks; the host runs ahead as far as the launch queue lets it.


def predict_no_sync(context: StepContext, _value: str) -> Outcome:
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


# no-data-wait: every batch is ready when the step needs it.


def predict_no_data_wait(context: StepContext, _value: str) -> Outcome:
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


# no-breaks: torch.compile traces the lines that split the model, and the graphs become one.
#
# The host's time from one graph to the next disappears, and so do the calls there that wait for the
# device: a value that Python reads is the commonest break.


def predict_no_breaks(context: StepContext, _value: str) -> Outcome:
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


# no-stalls: every step is a typical one. no-stalls=data,gc: stalls of these causes are gone.


def predict_no_stalls(context: StepContext, value: str) -> Outcome:
    """Refuses a run whose steps are not known, and one without such stalls."""
    causes = _causes(value)
    stalls = context.stalls
    if stalls is None:
        raise Refused(
            "no-stalls: only a run folder has every step of the run. Record one with "
            "`stepscope run`"
        )
    left = stalls.without(causes)
    saved_ns = stalls.total_ns - left.total_ns
    if saved_ns <= 0:
        raise Refused(f"no-stalls: the run has no {_named(value)}stalls")
    return Outcome(
        context=replace(context, stalls=left),
        assumptions=(f"{milliseconds(saved_ns / 1e6)} per step of {_named(value)}stalls removed",),
        spread=0.05,
    )


def _causes(value: str) -> tuple[str, ...]:
    names = _split(value)
    unknown = next((name for name in names if name not in STALL_CAUSES), None)
    if unknown is not None:
        known = ", ".join(STALL_CAUSES)
        raise WrongValue(
            f"no-stalls={value}: {unknown!r} is not a cause of stalls. There are {known}"
        )
    return names or STALL_CAUSES


def _split(value: str) -> tuple[str, ...]:
    return tuple(name.strip().replace("-", "_") for name in value.split(",")) if value else ()


def _named(value: str) -> str:
    """The causes, before the word "stalls"."""
    return f"{' and '.join(map(name_cause, _split(value)))} " if value else ""
