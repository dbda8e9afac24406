"""cuda-graphs: the whole step launched at once; the host no longer decides its length."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain import intervals
from stepscope.explain.replay.graph import CallKind, Calls
from stepscope.explain.work import Kind
from stepscope.predict.outcome import Outcome, Refused, changed
from stepscope.records.words import counted
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Tasks
    from stepscope.predict.step_context import StepContext

HELP = "launch the whole step as one CUDA graph"
# Between kernels of a graph, as measured (H200); a launch costs the host this much.
SPACING_NS = 1_000.0
_LAUNCH_NS = 30_000.0
_PER_NODE_NS = 60.0


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses on a CPU, where the step is a graph already, and where nothing is launched."""
    del value
    graph = context.graph
    tasks = graph.tasks
    if context.on_host or not len(tasks):
        raise Refused("cuda-graphs: the trace has no accelerator")
    if any(name.startswith("gloo:") for name in context.trace.strings):
        raise Refused("cuda-graphs: gloo exchanges tensors on the host, which no graph records")
    if len(graph.calls) and len(tasks) > 20 * int((graph.calls.kind == CallKind.LAUNCH).sum()):
        raise Refused("cuda-graphs: the step is launched as a graph already")
    waits = int((graph.calls.kind == CallKind.WAIT).sum())
    one = Calls(
        kind=np.array([CallKind.LAUNCH], np.int8),
        gap_ns=np.array([_LAUNCH_NS]),
        call_ns=np.array([_PER_NODE_NS * len(tasks)]),
        tail_ns=np.zeros(1),
        phase=np.zeros(1, np.int8),
        row=np.full(1, -1, np.int32),
        operator=np.full(1, -1, np.int32),
        frames=np.zeros(1),
        awaits=((),),
    )
    tasks = _in_a_row(context)
    inside = replace(
        tasks,
        call=np.zeros(len(tasks), np.int32),
        spacing_ns=np.full(len(tasks), SPACING_NS),
        latency_ns=np.full(len(tasks), 5_000.0),
    )
    said = [
        f"{counted(len(tasks), 'kernel')} in one launch, {SPACING_NS / 1000:.1f} µs apart; "
        "shapes must stay "
        "the same from step to step",
    ]
    if waits:
        said.append(
            f"{counted(waits, 'blocking call')} per step must go: nothing may wait inside a graph"
        )
    spread = 0.05
    if tasks is not graph.tasks:
        spread = 0.35
        said.append("several streams compute; how far they will overlap is a guess")
    new = replace(graph, calls=one, tasks=inside, end_ns=0.0, queue_depth=1 << 30)
    return Outcome(context=changed(context, new), assumptions=tuple(said), spread=spread)


def _in_a_row(context: StepContext) -> Tasks:
    """Compute of several streams on one, shortened to between what they take one after the other
    and what the busiest takes alone.

    Which of them wait for which is not in the trace: while the host was slow, nothing had to wait.
    """
    tasks = context.graph.tasks
    compute = tasks.kind == Kind.COMPUTE
    streams = distinct(tasks.stream[compute])
    if len(streams) < 2:
        return tasks
    work = context.work
    mine = work.kind == Kind.COMPUTE
    summed = float((work.end_ns[mine] - work.start_ns[mine]).sum())
    seen = intervals.length(work.compute) / summed if summed else 1.0
    busiest = np.bincount(tasks.stream[compute], tasks.dur_ns[compute]).max()
    overlap = math.sqrt(seen * busiest / tasks.dur_ns[compute].sum())
    return replace(
        tasks,
        stream=np.where(compute, streams[0], tasks.stream).astype(np.int32),
        dur_ns=np.where(compute, tasks.dur_ns * overlap, tasks.dur_ns),
        after=np.where(compute, -1, tasks.after).astype(np.int32),
    )
