"""What the profiler itself cost the host, taken out of a step before it is replayed.

Recording an operator takes time of its own, and crowds the caches of everything else. How much it
did in a trace shows in the trace: operators that do nothing but call another (aten::t calls
aten::transpose) take as long as recording makes them. So all of the host's time is shortened by one
factor that depends on how long those took, less a little for every Python function recorded. The
three constants were fitted to steps timed with and without the profiler on H200 machines
(docs/accuracy.md has the table, and the error on models left out of the fit).

Where a run measured its own steps without the profiler, those decide: the host's time is brought to
where the replayed step is the measured one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.cpu_overhead import runs_on_host, without_profiler_on_cpu
from stepscope.explain.replay.graph import CallKind
from stepscope.explain.replay.schedule import step_ns
from stepscope.records.trace import HostKind

if TYPE_CHECKING:
    from typing import Literal

    from stepscope.explain.replay.graph import StepGraph
    from stepscope.records.trace import Trace

# From the start of an operator to the start of the one it calls first, in a usual trace.
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
# A host much slower or faster than any seen says more about the machine than about the profiler.
_SLOWEST, _FASTEST = 1.6, 0.55


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The host's time without the profiler over that with it."""

    host: float = 0.68
    slowness: float = -0.40  # power of how slow such operators were
    frame_ns: float = 1_500.0  # a recorded Python function
    spread: float = 0.06  # of the logarithm of the host's time, one standard deviation


WITH_SHAPES = Rates()
# Recording without shapes costs about half (1.2 instead of 1.4 on a CPU). Not fitted on a GPU.
WITHOUT_SHAPES = Rates(host=0.83, spread=0.1)
# A step this close to what the device alone needs is the device's.
_DEVICE_BOUND, _SURELY_DEVICE = 1.02, 1.1
_SAME = 1.005
_MOST_SCALE, _HALVINGS = 64.0, 20
# Traces that tell nothing about the host's speed.
UNTOLD = 0.1


class Corrected(msgspec.Struct, frozen=True, kw_only=True):
    """A step without the profiler's cost, and how far off that may be."""

    graph: StepGraph
    step_ns: float
    low_ns: float
    high_ns: float
    basis: Literal["measured", "calibrated"]
    host_scale: float  # of the host's time, after the correction
    spread: float = 0.0  # of the logarithm of the host's time


def correct(
    graph: StepGraph,
    trace: Trace,
    *,
    measured_ns: float | None = None,
    slowness: float | None = None,
) -> Corrected:
    """By the measured step where there is one, else by the calibrated constants. `slowness` is
    looked for in the trace unless it is given."""
    shapes = bool(trace.facts.get("record_shapes", True))
    rates = WITH_SHAPES if shapes else WITHOUT_SHAPES
    slow = slowness or find_slowness(trace)
    if runs_on_host(trace):
        lighter, spread = without_profiler_on_cpu(graph, trace, slow)
    else:
        lighter = without_profiler(graph, rates, slow or 1.0)
        spread = rates.spread if slow else float(np.hypot(rates.spread, UNTOLD))
    if measured_ns is not None:
        return _fitted(lighter, measured_ns)
    low, high = (
        step_ns(scale_host(lighter, float(np.exp(sign * 1.96 * spread)))) for sign in (-1, 1)
    )
    return Corrected(
        graph=lighter,
        step_ns=step_ns(lighter),
        low_ns=low,
        high_ns=high,
        basis="calibrated",
        host_scale=lighter.host_ns / graph.host_ns if graph.host_ns else 1.0,
        spread=spread,
    )


def without_profiler(
    graph: StepGraph, rates: Rates = WITH_SHAPES, slowness: float = 1.0
) -> StepGraph:
    """The host's time as the constants say it would have been. Device times stay."""
    calls = graph.calls
    if not (calls.kind != CallKind.PLAIN).any():
        return graph
    factor = rates.host * slowness**rates.slowness
    frames = rates.frame_ns * slowness**rates.slowness * calls.frames
    gaps = np.maximum(factor * calls.gap_ns - frames, 0.2 * factor * calls.gap_ns)
    inside = np.divide(gaps, calls.gap_ns, out=np.ones(len(calls)), where=calls.gap_ns > 0)
    return replace(
        graph,
        calls=replace(
            calls,
            gap_ns=gaps,
            operators_ns=inside * calls.operators_ns,
            runtime_ns=inside * calls.runtime_ns,
            call_ns=factor * calls.call_ns,
            frames=np.zeros(len(calls)),
        ),
        end_ns=factor * graph.end_ns,
    )


def find_slowness(trace: Trace) -> float | None:
    """How slow operators were that only call another, 1 being usual; None where there are none."""
    host = trace.host
    rows = np.flatnonzero((host.kind == HostKind.OPERATOR) & (host.parent >= 0))
    first = rows[rows == host.parent[rows] + 1]  # a first child is the next row
    codes = {name: code for code, name in enumerate(trace.strings)}
    found = []
    for (outer, inner), usual in USUAL_NS.items():
        if outer in codes and inner in codes:
            mine = first[
                (host.name[first] == codes[inner]) & (host.name[host.parent[first]] == codes[outer])
            ]
            if len(mine) >= _ENOUGH:
                took = host.start_ns[mine] - host.start_ns[host.parent[mine]]
                found.append(float(np.log(max(float(np.median(took)), 1.0) / usual)))
    if not found:
        return None
    return min(max(float(np.exp(np.median(found))), _FASTEST), _SLOWEST)


def scale_host(graph: StepGraph, factor: float) -> StepGraph:
    """All of the host's time by one factor."""
    calls = graph.calls
    names = ("gap_ns", "operators_ns", "runtime_ns", "call_ns")
    scaled = {name: factor * getattr(calls, name) for name in names}
    return replace(graph, calls=replace(calls, **scaled), end_ns=factor * graph.end_ns)


def _fitted(graph: StepGraph, measured_ns: float) -> Corrected:
    """The host's time scaled until the replayed step is the measured one.

    Where the device alone needs about that long, the measurement says nothing about the host: its
    time stays as calibrated, and the device's is brought to the measured step.
    """
    floor = step_ns(scale_host(graph, 0.0))
    decided = step_ns(graph) <= floor * 1.01  # by the device, as calibrated
    if measured_ns <= floor * (_SURELY_DEVICE if decided else _DEVICE_BOUND):
        fitted, scale = _with_device(graph, measured_ns / floor), 1.0
        if step_ns(fitted) > measured_ns * _SAME:  # the host was slower than it can have been
            scale = _host_scale(fitted, measured_ns)
            fitted = scale_host(fitted, scale)
    else:
        scale = _host_scale(graph, measured_ns)
        fitted = scale_host(graph, scale)
    return Corrected(
        graph=fitted,
        step_ns=step_ns(fitted),
        low_ns=measured_ns,
        high_ns=measured_ns,
        basis="measured",
        host_scale=scale,
    )


def _with_device(graph: StepGraph, factor: float) -> StepGraph:
    tasks = graph.tasks
    shorter = replace(tasks, dur_ns=tasks.dur_ns * factor, spacing_ns=tasks.spacing_ns * factor)
    return replace(graph, tasks=shorter)


def _host_scale(graph: StepGraph, measured_ns: float) -> float:
    low, high = 0.0, 1.0
    while step_ns(scale_host(graph, high)) < measured_ns and high < _MOST_SCALE:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if step_ns(scale_host(graph, middle)) < measured_ns:
            low = middle
        else:
            high = middle
    return high
