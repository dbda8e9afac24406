"""Removes the profiler's cost from the host's time before a step is replayed.

Recording an operator takes time and fills the caches. The trace itself shows how much: operators
that only call another (aten::t calls aten::transpose) take as long as their recording does. So the
host's time is shortened by a factor that depends on how long those took, minus a little for every
recorded Python function. Most of these operators belong to backward, which has a thread of its own.
How fast a thread was during recording also shows in its kernel launches, so each phase's launches
influence its factor. Kernels of a CUDA graph have a rule of their own (graph_launches.py). The
constants were fitted to steps timed with and without the profiler on H200 machines
(docs/records/predictions.md has the table, and the error on models left out of the fit).

If a run measured its own steps without the profiler, those decide (measured.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.errors import NotCapturedError
from stepscope.explain.quantiles import median
from stepscope.explain.replay.cpu_overhead import runs_on_host, without_profiler_on_cpu
from stepscope.explain.replay.graph import CallKind, Phase
from stepscope.explain.replay.graph_launches import NODE_SPACING, scale_node_spacing
from stepscope.explain.replay.measured import fit_to, scale_host
from stepscope.explain.replay.schedule import step_ns
from stepscope.explain.work import named, one_of
from stepscope.records.figures import milliseconds
from stepscope.records.measured_steps import MeasuredSteps
from stepscope.records.trace import HostKind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from stepscope.explain.replay.graph import StepGraph
    from stepscope.records.trace import Trace

# From an operator's start to the start of the first one it calls, in a usual trace.
USUAL_NS = {
    ("torch::autograd::AccumulateGrad", "aten::detach"): 1408.0,
    ("aten::detach", "detach"): 855.0,
    ("aten::empty_like", "aten::empty"): 1572.0,
    ("aten::t", "aten::transpose"): 1391.0,
    ("aten::transpose", "aten::as_strided"): 1940.0,
    ("aten::reshape", "aten::view"): 1300.0,
    ("TBackward0", "aten::t"): 1175.0,
}
_ENOUGH = 9  # calls of a pair
# A host far slower or faster than any seen reflects the machine more than the profiler.
_SLOWEST, _FASTEST = 1.6, 0.55


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The host's time without the profiler over that with it."""

    host: float = 0.66
    slowness: float = -0.2  # power of how slow such operators were
    launch: float = -0.4  # power of how slow a phase's launches were
    frame_ns: float = 1_500.0  # a recorded Python function
    spread: float = 0.1  # of the logarithm of the host's time, one standard deviation


WITH_SHAPES = Rates()
# Recording without shapes costs about half (1.2 instead of 1.4 on a CPU). Not fitted on a GPU.
WITHOUT_SHAPES = Rates(host=0.81, spread=0.14)
USUAL_LAUNCH_NS = 7_000.0
_ENOUGH_LAUNCHES = 20
_SLOWEST_LAUNCH = 3.0
_KERNEL_LAUNCH = one_of("launchkernel kernellaunch launchcooperative")
# A replay longer or shorter than the recorded step by this factor is of another step.
_ANOTHER_STEP = 1.5
# Added spread for traces that show nothing about the host's speed.
UNKNOWN_SPEED = 0.1
# Spread of the log of the host's time from one process of a script to the next. Promises of 13
# host-bound steps on H200 machines had errors of 0.13, of which the change itself is a part.
BETWEEN_RUNS = 0.1


class Corrected(msgspec.Struct, frozen=True, kw_only=True):
    """A step without the profiler's cost, and its range."""

    graph: StepGraph
    step_ns: float
    low_ns: float
    high_ns: float
    basis: Literal["measured", "calibrated", "profiled"]
    spread: float = 0.0  # of the logarithm of the host's time
    host_measured: bool = False  # even if the device decides
    unexplained: float = 0.0  # logarithm: what the step has more than host and kernels explain


def correct(
    graph: StepGraph,
    trace: Trace,
    *,
    truth: MeasuredSteps | None = None,
    slowness: float | None = None,
) -> Corrected:
    """By measured steps if there are any, else by the calibrated constants."""
    shapes = bool(trace.facts.get("record_shapes", True))
    rates = WITH_SHAPES if shapes else WITHOUT_SHAPES
    slow = slowness or find_slowness(trace)
    if runs_on_host(trace):
        lighter, spread = without_profiler_on_cpu(graph, trace, slow)
        host = lighter
    else:
        host = without_profiler(graph, rates, slow or 1.0, launch_slowness(graph, trace))
        lighter = scale_node_spacing(host, trace, NODE_SPACING)
        spread = rates.spread if slow else float(np.hypot(rates.spread, UNKNOWN_SPEED))
    if truth is not None:
        fitted, _ = fit_to(lighter, truth)
        return Corrected(
            graph=fitted,
            step_ns=step_ns(fitted),
            low_ns=float(truth.step_ns),
            high_ns=float(truth.step_ns),
            basis="measured",
            spread=BETWEEN_RUNS,
            host_measured=bool(truth.host_ns),
            unexplained=_longer_tasks(lighter, fitted),
        )
    return Corrected(
        graph=lighter,
        step_ns=step_ns(lighter),
        low_ns=_at_deviations(scale_node_spacing(host, trace, 0.0), -1.96 * spread),
        high_ns=_at_deviations(host, 1.96 * spread),
        basis="calibrated",
        spread=spread,
    )


def _longer_tasks(traced: StepGraph, fitted: StepGraph) -> float:
    """By how much tasks had to become longer than the trace has them, as a logarithm."""
    before, after = (float(graph.tasks.dur_ns.sum()) for graph in (traced, fitted))
    return max(0.0, float(np.log(after / before))) if before and after else 0.0


def _at_deviations(graph: StepGraph, log_factor: float) -> float:
    """The step if the host's time differs by this logarithm."""
    return step_ns(scale_host(graph, float(np.exp(log_factor))))


def as_recorded(graph: StepGraph, trace: Trace, recorded_ns: float) -> Corrected:
    """The step as the profiler saw it, when its cost is unknown. Raises NotCapturedError if the
    replay differs too much from the recorded step."""
    replayed = step_ns(graph)
    if not recorded_ns / _ANOTHER_STEP < replayed < recorded_ns * _ANOTHER_STEP:
        raise NotCapturedError(
            f"{trace.path}: the recorded step takes {milliseconds(recorded_ns / 1e6)}, but its "
            f"work replays in {milliseconds(replayed / 1e6)}: the effect of a change cannot be "
            "predicted. Record two or more whole steps (profiler.step() after each, or "
            "`stepscope run`)"
        )
    fitted, _ = fit_to(graph, _only_the_step(recorded_ns))
    spread = float(np.hypot(WITH_SHAPES.spread, UNKNOWN_SPEED))
    return Corrected(
        graph=fitted,
        step_ns=step_ns(fitted),
        low_ns=_at_deviations(fitted, -1.96 * spread),
        high_ns=recorded_ns,
        basis="profiled",
        spread=spread,
    )


def _only_the_step(ns: float) -> MeasuredSteps:
    whole = round(ns)
    return MeasuredSteps(
        steps=1, steps_ns=(whole,), step_ns=whole, wall_ns=whole, device_ns=None, phases_ns={}
    )


def without_profiler(
    graph: StepGraph,
    rates: Rates = WITH_SHAPES,
    slowness: float = 1.0,
    launches: Sequence[float] | None = None,
) -> StepGraph:
    """Scale the host's time. `launches` is how slow the launches of each phase were."""
    calls = graph.calls
    if not (calls.kind != CallKind.PLAIN).any():
        return graph
    of_phase = np.array(launches or (1.0,) * len(Phase)) ** rates.launch
    slower = slowness**rates.slowness * of_phase[calls.phase]
    factor = rates.host * slower
    frames = rates.frame_ns * slower * calls.frames
    gaps = np.maximum(factor * calls.gap_ns - frames, 0.2 * factor * calls.gap_ns)
    none = np.zeros(len(calls))
    calls = replace(calls, gap_ns=gaps, call_ns=factor * calls.call_ns, frames=none)
    return replace(graph, calls=calls, end_ns=float(factor[-1]) * graph.end_ns)


def launch_slowness(graph: StepGraph, trace: Trace) -> tuple[float, ...]:
    """How slow each phase's kernel launches were; 1 is usual. A phase with few launches takes the
    forward pass's value, from the same thread; 1 if the trace shows none."""
    calls = graph.calls
    launching = (calls.kind == CallKind.LAUNCH) & (calls.row >= 0)
    if not launching.any():
        return (1.0,) * len(Phase)
    known = named(trace, trace.host.name[calls.row], launching, _KERNEL_LAUNCH)
    slowness = {}
    for phase in Phase:
        times_ns = calls.call_ns[known & (calls.phase == phase)]
        if len(times_ns) >= _ENOUGH_LAUNCHES:
            slow = median(times_ns) / USUAL_LAUNCH_NS
            slowness[phase] = min(max(slow, 1 / _SLOWEST_LAUNCH), _SLOWEST_LAUNCH)
    forward = slowness.get(Phase.FORWARD, 1.0)
    return tuple(slowness.get(phase, forward) for phase in Phase)


def find_slowness(trace: Trace) -> float | None:
    """How slow operators were that only call another; 1 is usual, None if there are none."""
    host = trace.host
    rows = np.flatnonzero((host.kind == HostKind.OPERATOR) & (host.parent >= 0))
    first = rows[rows == host.parent[rows] + 1]  # a first child is the next row
    name, name_above = host.name[first], host.name[host.parent[first]]
    codes = {name: code for code, name in enumerate(trace.strings)}
    logs = []
    for (outer, inner), usual in USUAL_NS.items():
        if outer in codes and inner in codes:
            pairs = first[(name == codes[inner]) & (name_above == codes[outer])]
            if len(pairs) >= _ENOUGH:
                took = host.start_ns[pairs] - host.start_ns[host.parent[pairs]]
                logs.append(float(np.log(max(median(took), 1.0) / usual)))
    if not logs:
        return None
    return min(max(float(np.exp(median(logs))), _FASTEST), _SLOWEST)
