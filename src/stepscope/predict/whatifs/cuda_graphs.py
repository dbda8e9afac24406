"""cuda-graphs: the whole step in one launch; the host no longer decides how long it takes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.predict.declaration import NothingToChange, Outcome, changed
from stepscope.predict.kernel_costs import LAUNCH_NS, PER_NODE_NS, SPACING_NS
from stepscope.step import intervals
from stepscope.step.cuda_graphs import is_of_graphs
from stepscope.step.graph import CallKind, Calls, Tasks
from stepscope.step.work import Kind
from stepscope.text.figures import duration
from stepscope.text.words import counted
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext

_LATENCY_NS = 5_000.0
_KERNELS_PER_LAUNCH = 20  # more, and the step is a graph already


def predict(context: StepContext, _value: str) -> Outcome:
    """Refuses a CPU, a step that is a graph already, and a step that launches nothing."""
    graph = context.graph
    if context.on_host or not len(graph.tasks):
        raise NothingToChange("cuda-graphs: the trace has no GPU")
    if any(name.startswith("gloo:") for name in context.trace.strings):
        raise NothingToChange(
            "cuda-graphs: gloo exchanges tensors on the CPU, which no graph can capture"
        )
    launches = int((graph.calls.kind == CallKind.LAUNCH).sum())
    many = len(graph.calls) and len(graph.tasks) > _KERNELS_PER_LAUNCH * launches
    if many or is_of_graphs(graph, context.trace):
        raise NothingToChange("cuda-graphs: the step is launched as a graph already")
    tasks = _join_streams(context)
    assumptions = [
        f"{counted(len(tasks), 'kernel')} in one launch, {duration(SPACING_NS)} apart. Shapes "
        "must stay the same from step to step"
    ]
    waits = int((graph.calls.kind == CallKind.WAIT).sum())
    if waits:
        assumptions.append(
            f"{counted(waits, 'blocking call')} per step must be removed: nothing may wait "
            "inside a graph"
        )
    spread = 0.05
    if tasks is not graph.tasks:
        spread = 0.35
        assumptions.append("several streams compute, and how far they will overlap is an estimate")
    inside = replace(
        tasks,
        call=np.zeros(len(tasks), np.int32),
        spacing_ns=np.full(len(tasks), SPACING_NS),
        latency_ns=np.full(len(tasks), _LATENCY_NS),
    )
    launched = replace(
        graph, calls=_one_launch(len(tasks)), tasks=inside, end_ns=0.0, queue_depth=1 << 30
    )
    return Outcome(
        context=changed(context, launched), assumptions=tuple(assumptions), spread=spread
    )


def _one_launch(tasks: int) -> Calls:
    return Calls(
        kind=np.array([CallKind.LAUNCH], np.int8),
        gap_ns=np.array([LAUNCH_NS]),
        call_ns=np.array([PER_NODE_NS * tasks]),
        tail_ns=np.zeros(1),
        phase=np.zeros(1, np.int8),
        row=np.full(1, -1, np.int32),
        operator=np.full(1, -1, np.int32),
        frames=np.zeros(1),
        awaits=((),),
    )


def _join_streams(context: StepContext) -> Tasks:
    """Put the compute of several streams on one, and shorten it by a guessed overlap.

    The guess lies between no overlap and all of it behind the busiest stream. Which tasks wait for
    which is not in the trace: while the host was slow, nothing had to wait.
    """
    tasks = context.graph.tasks
    compute = tasks.kind == Kind.COMPUTE
    streams = distinct(tasks.stream[compute])
    if len(streams) < 2:
        return tasks
    work = context.work
    computing = work.kind == Kind.COMPUTE
    summed = float((work.end_ns[computing] - work.start_ns[computing]).sum())
    traced = intervals.length(work.compute) / summed if summed else 1.0
    busiest = np.bincount(tasks.stream[compute], tasks.dur_ns[compute]).max()
    overlap = math.sqrt(traced * busiest / tasks.dur_ns[compute].sum())
    return replace(
        tasks,
        stream=np.where(compute, streams[0], tasks.stream).astype(np.int32),
        dur_ns=np.where(compute, tasks.dur_ns * overlap, tasks.dur_ns),
        after=np.where(compute, -1, tasks.after).astype(np.int32),
    )
