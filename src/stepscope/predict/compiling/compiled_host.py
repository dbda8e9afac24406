"""Predict the host's time for a compiled step: one launch after the other without autograd's
nodes, or one launch for each CUDA graph.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.predict.kernel_costs import (
    COMPILED_SPACING_NS,
    LAUNCH_NS,
    PER_NODE_NS,
    with_durations,
)
from stepscope.predict.step_context import StepContext
from stepscope.records.trace import HostKind
from stepscope.step.call_tree import by_text
from stepscope.step.edit import Selection, remove, scale_calls
from stepscope.step.graph import CallKind, Calls, Phase, StepGraph
from stepscope.step.replay import step_ns
from stepscope.step.statistics import median
from stepscope.step.work import rows_named
from stepscope.trace.links import distinct, nearest_of

if TYPE_CHECKING:
    from stepscope.predict.compiling.compiled_step import CompiledStep
    from stepscope.step.graph import Flags, Floats

# A compiled pass is Python code that calls its kernels one by one. The eager step shows the host's
# pace: its time per operator, where one that launches something counts as eight of those that do
# not (views, allocations). On 20 pairs of an eager and a compiled step on an H200 (14 models,
# 2026-11) the compiled passes took as long as 5 such operators per launch, 45 per parameter (its
# checks, its casts and those of its gradient, its products; 17 where nothing casts), and 270 per
# graph that is entered: guards, autograd, and making tensors of the results. As CUDA graphs,
# entering and 4 per gradient are left.
#
# The pace of a host changes from one moment to the next, by a deviation of 0.13 of its logarithm
# among these eager steps, and the compiled step runs at another moment. So an unusual pace is taken
# as half the moment's, and half of it is doubtful.

# In operators of the eager step that launch nothing.
_EAGER_LAUNCH = 7.0  # more than other operators
_LAUNCH, _ENTRY, _GRADIENT = 5.0, 270.0, 4.0
_PARAMETER, _CAST_PARAMETER = 17.0, 45.0
_MANY_CASTS = 0.25  # per parameter: autocast casts weights, and leaves norms alone
_LAUNCH_ALONE = 14.0  # where the parameters are not known
_USUAL_NS, _KEPT = 2_100.0, 0.5  # per operator; how much of an unusual pace stays
_CALL_DOUBT = 0.2  # of the logarithm: each model by the others 0.18, and launches miscounted
_LONGEST = 20.0  # median launches: the rest of a longer gap is no launching, and stays


class HostTimes(msgspec.Struct, frozen=True, kw_only=True):
    graph: StepGraph
    launches: int  # of both eager passes
    branches: int  # that split the compiled graphs
    share: float  # of the eager passes' host time
    doubt: float  # about the step's logarithm, as far as this host time decides it


def relaunch(context: StepContext, compiled: CompiledStep, *, graphed: bool) -> HostTimes:
    """The step with the compiled tasks and calls; `graphed` launches each graph as one."""
    graph = with_durations(context.graph, compiled.dur_ns)
    before = in_passes(graph.calls)
    eager_ns = _host_ns(graph.calls, before)
    eager = count_operators(context)
    unusual = _unusual_pace(graph.calls, eager.operators)
    operator_ns = _USUAL_NS * math.exp(_KEPT * unusual)
    doubt = math.hypot(_CALL_DOUBT, (1 - _KEPT) * unusual)
    graph = remove(graph, Selection(calls=_calls_gone(graph, compiled), tasks=compiled.gone))
    after = in_passes(graph.calls)
    graphs = len(distinct(graph.calls.phase[after])) * (1 + eager.branches)
    parameters = context.parameters.tensors if context.parameters else 0
    fixed_ns = operator_ns * (_ENTRY * graphs + _GRADIENT * parameters)
    per_launch = _LAUNCH if parameters else _LAUNCH_ALONE
    is_cast = compiled.casts >= _MANY_CASTS * parameters
    per_parameter = _CAST_PARAMETER if is_cast else _PARAMETER
    calls_ns = operator_ns * (per_launch * compiled.launches + per_parameter * parameters)
    wanted_ns = operator_ns * _ENTRY * graphs + calls_ns
    if graphed:
        wanted_ns = min(wanted_ns, fixed_ns + graphs * LAUNCH_NS + compiled.calls * PER_NODE_NS)
        graph = _close_up(graph, after)
    if not eager.operators:
        wanted_ns = eager_ns
    waits_ns = np.where(after, _other_ns(graph.calls), 0.0)
    left_ns = _host_ns(graph.calls, after)
    factor = wanted_ns / left_ns if left_ns > 0 else 1.0
    launching = scale_calls(_without_gaps(graph, waits_ns), after, factor)
    slower = scale_calls(launching, after, math.exp(2 * doubt))
    graph, slower = (_without_gaps(one, -waits_ns) for one in (launching, slower))
    return HostTimes(
        graph=graph,
        launches=int(before.sum()),
        branches=eager.branches,
        share=wanted_ns / eager_ns if eager_ns > 0 else 1.0,
        doubt=_half_of_change(graph, slower),
    )


def _unusual_pace(calls: Calls, operators: int) -> float:
    """The logarithm of the eager step's time per operator that launches nothing, over the usual."""
    launches = int((in_passes(calls) & (calls.row >= 0)).sum())
    seen_ns = _traced_ns(calls) / max(1.0, operators + _EAGER_LAUNCH * launches)
    return math.log(seen_ns / _USUAL_NS) if seen_ns > 0 else 0.0


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
        passes[tasks.call], np.minimum(tasks.spacing_ns, COMPILED_SPACING_NS), tasks.spacing_ns
    )
    return replace(graph, tasks=replace(tasks, spacing_ns=spacing))


# What the host did in the eager passes: operators that it ran, and branches on their results.
#
# An eager trace has all operators, views among them. The host's time per operator shows how fast it
# runs PyTorch's code, whatever the model.

_BRANCH = "aten::is_nonzero"


class EagerOperators(msgspec.Struct, frozen=True, kw_only=True):
    """Of the forward and the backward pass."""

    operators: int
    # Python asks whether a tensor of the host is true, and a compiler cannot know the answer.
    # Questions about the device's tensors stay out: they are mostly checks of a library's, which
    # leaves them out when it is compiled.
    branches: int


def count_operators(context: StepContext) -> EagerOperators:
    """Between the first and the last traced call of both passes."""
    host, calls = context.trace.host, context.graph.calls
    passes = (calls.phase == Phase.FORWARD) | (calls.phase == Phase.BACKWARD)
    rows = calls.row[passes & (calls.row >= 0)]
    if not len(rows):
        return EagerOperators(operators=0, branches=0)
    start = host.start_ns[rows]
    inside: Flags = (host.kind == HostKind.OPERATOR) & np.isin(host.thread, host.thread[rows])
    inside &= (host.start_ns >= start.min()) & (host.start_ns <= start.max())
    branch = rows_named(context.trace, host, inside, _BRANCH.__eq__)
    on_device = nearest_of(host, branch, calls.row[calls.row >= 0])
    branch[on_device[on_device >= 0]] = False
    return EagerOperators(operators=int(inside.sum()), branches=int(branch.sum()))


# Whether a step runs compiled code, and what one launch of it costs the host.

_COMPILED_MARKS = (
    "triton_",
    "## Call CompiledFxGraph",
    "CompiledFunction",
    "Torch-Compiled Region",
)


def is_compiled(context: StepContext) -> bool:
    """By the names that the compiler's code leaves in a trace."""
    return any(name.startswith(_COMPILED_MARKS) for name in context.trace.strings)


def launch_ns(context: StepContext) -> float:
    """The host's time per launch of both passes."""
    calls = context.graph.calls
    launching = in_passes(calls)
    total = float((calls.gap_ns + calls.call_ns)[launching].sum())
    return total / max(1, int(launching.sum()))


# A compiled step whose graphs are replayed as CUDA graphs: one launch for each of them.
#
# What the host does before a graph's first kernel stays: guards, and entering the compiled code.
# Each later kernel no longer needs a call of its own.

_REGION_MARKS = ("Torch-Compiled Region", "CompiledFunction")


def find_compiled_launches(context: StepContext) -> Flags:
    """Calls that compiled code makes."""
    calls, trace = context.graph.calls, context.trace
    inside = by_text(trace, trace.host.name, calls.operator, _names_compiled_region, False)
    found: Flags = inside & (calls.kind == CallKind.LAUNCH)
    return found


def _names_compiled_region(name: str) -> bool:
    return any(mark in name for mark in _REGION_MARKS)


def launch_as_graphs(context: StepContext, launches: Flags) -> StepGraph:
    """`launches` of one operator are one graph; a call that waits between them splits it."""
    graph = context.graph
    calls, tasks = graph.calls, graph.tasks
    owner = np.where(launches, calls.operator, -1)
    first = launches & (owner != np.concatenate(([-1], owner[:-1])))
    later = launches & ~first
    gap_ns = np.where(later, 0.0, calls.gap_ns)
    call_ns = np.where(launches, PER_NODE_NS, calls.call_ns) + LAUNCH_NS * first
    inside = later[tasks.call]
    spacing = np.where(inside, np.minimum(tasks.spacing_ns, COMPILED_SPACING_NS), tasks.spacing_ns)
    return replace(
        graph,
        calls=replace(calls, gap_ns=gap_ns, call_ns=call_ns),
        tasks=replace(tasks, spacing_ns=spacing),
    )
