"""The profiler's cost inside a CUDA graph: time between the kernels, not the host's.

A graph is one call of the host, so a trace of it has no operators that show how slow recording was,
and needs none: the device decides how long a graph takes. There the profiler notes the start and
the end of each kernel, and the kernels come further apart. It cannot have cost more than all the
time between them, nor less than nothing: those are the ends of the interval. In between lies what
two graphs on an H200 took without it (docs/records/predictions.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.graph_replays import MOSTLY, find_replayed, is_graph_launch
from stepscope.explain.replay.graph import CallKind
from stepscope.explain.work import named
from stepscope.records.quality import Note

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.explain.replay.graph import Flags, StepGraph
    from stepscope.records.explanation import StepTime
    from stepscope.records.trace import Trace

# Time between a graph's kernels without the profiler, over that with it: 0.41 and 0.76 were
# measured.
NODE_SPACING = 0.58


def has_graphs(trace: Trace) -> bool:
    """A CUDA graph launched some of the device's work."""
    return bool(find_replayed(trace).any())


def note_uncorrected(trace: Trace, step_ms: StepTime) -> Iterator[Note]:
    """Why a step of CUDA graphs is shown as the profiler recorded it."""
    if step_ms.corrected is None and has_graphs(trace):
        yield Note(
            id="graphs-not-corrected",
            detail="CUDA graphs ran in this window, and what the profiler cost them is not known: "
            "record two or more whole steps (profiler.step() after each, or `stepscope run`)",
        )


def find_graph_tasks(graph: StepGraph, trace: Trace) -> Flags:
    """Tasks that a graph launch started."""
    calls = graph.calls
    launching = (calls.kind == CallKind.LAUNCH) & (calls.row >= 0)
    if not launching.any():
        return np.zeros(len(graph.tasks), np.bool_)
    launches = launching & named(trace, trace.host.name[calls.row], launching, is_graph_launch)
    chosen: Flags = launches[graph.tasks.call]
    return chosen


def is_of_graphs(graph: StepGraph, trace: Trace) -> bool:
    """CUDA graphs run most of the step's device time."""
    dur_ns = graph.tasks.dur_ns
    return float(dur_ns[find_graph_tasks(graph, trace)].sum()) > MOSTLY * float(dur_ns.sum())


def scale_node_spacing(graph: StepGraph, trace: Trace, factor: float) -> StepGraph:
    """Kernels inside a graph come `factor` times as far apart; graphs themselves do not move."""
    chosen = find_graph_tasks(graph, trace)
    if not chosen.any():
        return graph
    tasks = graph.tasks
    inside = chosen & (np.diff(tasks.call, prepend=-1) == 0)
    spacing_ns = np.where(inside, factor * tasks.spacing_ns, tasks.spacing_ns)
    return replace(graph, tasks=replace(tasks, spacing_ns=spacing_ns))
