"""The host's time for a compiled step: one launch after the other, without autograd's nodes.

Measured on GPT-2 small on an H200 (eager against torch.compile, one machine): a launch of compiled
code takes 0.72 of what a launch of the eager backward pass takes, which runs no Python of the model
and so shows how fast the host is. Entering a pass and summing gradients at its end come on top.
Eight library models took more, 1.1 to 2, on a host whose own speed changed by half meanwhile
(benchmarks/compile_promises.py, 2026-11-17): so what the host paces is doubtful.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.quantiles import median
from stepscope.explain.replay.graph import CallKind, Phase
from stepscope.predict.edit import Selection, remove, scale_calls
from stepscope.predict.graph_costs import LAUNCH_NS, PER_NODE_NS, SPACING_NS
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Calls, Flags, Floats, StepGraph
    from stepscope.predict.compiling.compiled_step import CompiledStep

# In launches of the eager backward pass.
_LAUNCH, _ENTRY, _GRADIENT = 0.72, 9.0, 0.3
LAUNCH_DOUBT = 0.25  # of the logarithm, in a step that these launches pace
_LONGEST = 20.0  # median launches: the rest of a longer gap is no launching, and stays


class HostTimes(msgspec.Struct, frozen=True, kw_only=True):
    graph: StepGraph
    launches_before: int
    launches: int  # of both passes
    share: float  # of the eager passes' host time


def relaunch(
    graph: StepGraph, compiled: CompiledStep, gradients: int, *, graphed: bool
) -> HostTimes:
    """The step with the compiled tasks and launches; `graphed` launches a pass as one graph."""
    tasks = replace(graph.tasks, dur_ns=compiled.dur_ns)
    before = in_passes(graph.calls)
    eager_ns = _host_ns(graph.calls, before)
    unit_ns = _launch_ns(graph.calls)
    graph = remove(
        replace(graph, tasks=tasks),
        Selection(calls=_without_tasks(graph, compiled), tasks=compiled.gone),
    )
    after = in_passes(graph.calls)
    launches = int(after.sum())
    passes = len(distinct(graph.calls.phase[after]))
    fixed_ns = unit_ns * (_ENTRY * passes + _GRADIENT * gradients)
    wanted_ns = fixed_ns + launches * unit_ns * _LAUNCH
    if graphed:
        wanted_ns = min(wanted_ns, fixed_ns + passes * LAUNCH_NS + launches * PER_NODE_NS)
        graph = _close_up(graph, after)
    wanted_ns = min(wanted_ns, eager_ns)
    left_ns = _host_ns(graph.calls, after)
    factor = wanted_ns / left_ns if left_ns > 0 else 1.0
    waits_ns = np.where(after, _other_ns(graph.calls), 0.0)
    scaled = scale_calls(_without_gaps(graph, waits_ns), after, factor)
    return HostTimes(
        graph=_without_gaps(scaled, -waits_ns),
        launches_before=int(before.sum()),
        launches=launches,
        share=wanted_ns / eager_ns if eager_ns > 0 else 1.0,
    )


def is_paced_by_host(graph: StepGraph) -> bool:
    """Whether launching takes longer than all that is launched."""
    calls = graph.calls
    return float((calls.gap_ns + calls.call_ns).sum()) > float(graph.tasks.dur_ns.sum())


def in_passes(calls: Calls) -> Flags:
    """Launches of the forward and the backward pass."""
    passes = (calls.phase == Phase.FORWARD) | (calls.phase == Phase.BACKWARD)
    launches: Flags = passes & (calls.kind == CallKind.LAUNCH)
    return launches


def _host_ns(calls: Calls, chosen: Flags) -> float:
    """Spent on launching."""
    return float((calls.gap_ns - _other_ns(calls) + calls.call_ns)[chosen].sum())


def _other_ns(calls: Calls) -> Floats:
    """The part of each gap that is something else: data, logging, a pause."""
    launching = in_passes(calls)
    if not launching.any():
        return np.zeros(len(calls))
    typical = median((calls.gap_ns + calls.call_ns)[launching])
    other: Floats = np.maximum(calls.gap_ns - _LONGEST * typical, 0.0)
    return other


def _without_gaps(graph: StepGraph, gaps_ns: Floats) -> StepGraph:
    return replace(graph, calls=replace(graph.calls, gap_ns=graph.calls.gap_ns - gaps_ns))


def _launch_ns(calls: Calls) -> float:
    """Of one launch of the eager backward pass, of any launch where there is none."""
    launching = in_passes(calls)
    backward = launching & (calls.phase == Phase.BACKWARD)
    chosen = backward if backward.any() else launching
    return _host_ns(calls, chosen) / max(1, int(chosen.sum()))


def _without_tasks(graph: StepGraph, compiled: CompiledStep) -> Flags:
    """Calls that launched only tasks that are gone."""
    launched = np.bincount(graph.tasks.call, minlength=len(graph.calls))
    gone = np.bincount(graph.tasks.call[compiled.gone], minlength=len(graph.calls))
    empty: Flags = (launched > 0) & (gone == launched)
    return empty


def _close_up(graph: StepGraph, passes: Flags) -> StepGraph:
    """Kernels of a graph follow each other closely."""
    tasks = graph.tasks
    spacing = np.where(
        passes[tasks.call], np.minimum(tasks.spacing_ns, SPACING_NS), tasks.spacing_ns
    )
    return replace(graph, tasks=replace(tasks, spacing_ns=spacing))
