"""The host's time for a compiled step: one call after the other, without autograd's nodes.

A compiled pass is Python code that calls its kernels one by one: each Triton kernel and each
library call. Measured on nine models on an H200 (eager, then torch.compile, 2026-11): such a call
takes as long as six operators of the eager step, views and all. Entering a graph takes as long as
80, and so does entering it as a CUDA graph: guards, autograd, and making tensors of the results.
The host's own speed changed by a third between the two measurements of a pair, so the doubt is
large.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.quantiles import median
from stepscope.explain.replay.graph import CallKind, Phase
from stepscope.explain.replay.schedule import step_ns
from stepscope.predict.compiling.eager_operators import count_operators
from stepscope.predict.edit import Selection, remove, scale_calls
from stepscope.predict.graph_costs import LAUNCH_NS, PER_NODE_NS
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Calls, Flags, Floats, StepGraph
    from stepscope.predict.compiling.compiled_step import CompiledStep
    from stepscope.predict.step_context import StepContext

# In operators of the eager step.
_CALL, _ENTRY, _GRADIENT = 6.0, 80.0, 1.8
_CALL_DOUBT = 0.22  # of the logarithm: each model by the others 0.19, and calls miscounted
# Between kernels of a compiled CUDA graph: seven models took their kernels' time and 0 to 0.3 us.
_SPACING_NS = 300.0
_LONGEST = 20.0  # median launches: the rest of a longer gap is no launching, and stays


class HostTimes(msgspec.Struct, frozen=True, kw_only=True):
    graph: StepGraph
    launches: int  # of both eager passes
    branches: int  # that split the compiled graphs
    share: float  # of the eager passes' host time
    doubt: float  # about the step's logarithm, as far as this host time decides it


def relaunch(context: StepContext, compiled: CompiledStep, *, graphed: bool) -> HostTimes:
    """The step with the compiled tasks and calls; `graphed` launches each graph as one."""
    graph = replace(context.graph, tasks=replace(context.graph.tasks, dur_ns=compiled.dur_ns))
    before = in_passes(graph.calls)
    eager_ns = _host_ns(graph.calls, before)
    eager = count_operators(context)
    operator_ns = _traced_ns(graph.calls) / max(1, eager.operators)
    graph = remove(graph, Selection(calls=_calls_gone(graph, compiled), tasks=compiled.gone))
    after = in_passes(graph.calls)
    graphs = len(distinct(graph.calls.phase[after])) * (1 + eager.branches)
    gradients = context.parameters.tensors if context.parameters else 0
    fixed_ns = operator_ns * (_ENTRY * graphs + _GRADIENT * gradients)
    wanted_ns = fixed_ns + compiled.calls * operator_ns * _CALL
    if graphed:
        wanted_ns = min(wanted_ns, fixed_ns + graphs * LAUNCH_NS + compiled.calls * PER_NODE_NS)
        graph = _close_up(graph, after)
    if not eager.operators:
        wanted_ns = eager_ns
    waits_ns = np.where(after, _other_ns(graph.calls), 0.0)
    left_ns = _host_ns(graph.calls, after)
    factor = wanted_ns / left_ns if left_ns > 0 else 1.0
    launching = scale_calls(_without_gaps(graph, waits_ns), after, factor)
    slower = scale_calls(launching, after, math.exp(2 * _CALL_DOUBT))
    graph, slower = (_without_gaps(one, -waits_ns) for one in (launching, slower))
    return HostTimes(
        graph=graph,
        launches=int(before.sum()),
        branches=eager.branches,
        share=wanted_ns / eager_ns if eager_ns > 0 else 1.0,
        doubt=_half_of_change(graph, slower),
    )


def _half_of_change(graph: StepGraph, slower: StepGraph) -> float:
    """`slower` is two deviations away: a host that just keeps up may yet pace the step."""
    now = step_ns(graph)
    return 0.5 * math.log(max(1.0, step_ns(slower) / now)) if now > 0 else 0.0


def is_paced_by_host(graph: StepGraph) -> bool:
    """Whether launching takes longer than all that is launched."""
    return graph.host_ns > graph.device_ns


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


def _traced_ns(calls: Calls) -> float:
    """Of the passes' calls that the trace has, not of those that other what-ifs added."""
    passes = (calls.phase == Phase.FORWARD) | (calls.phase == Phase.BACKWARD)
    return _host_ns(calls, passes & (calls.row >= 0))


def _calls_gone(graph: StepGraph, compiled: CompiledStep) -> Flags:
    """Calls that launched only tasks that are gone, and those that looked at a mask."""
    launched = np.bincount(graph.tasks.call, minlength=len(graph.calls))
    gone = np.bincount(graph.tasks.call[compiled.gone], minlength=len(graph.calls))
    empty: Flags = (launched > 0) & (gone == launched)
    return empty | compiled.checks


def _close_up(graph: StepGraph, passes: Flags) -> StepGraph:
    """Kernels of a graph follow each other closely."""
    tasks = graph.tasks
    spacing = np.where(
        passes[tasks.call], np.minimum(tasks.spacing_ns, _SPACING_NS), tasks.spacing_ns
    )
    return replace(graph, tasks=replace(tasks, spacing_ns=spacing))
