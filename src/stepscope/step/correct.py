"""Take the profiler's cost out of the host's time, on a GPU and on a CPU, and fit the step
to what the same run measured without the profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from stepscope.errors import NotCapturedError
from stepscope.records.normal import NORMAL_95, median
from stepscope.records.rank import MeasuredSteps
from stepscope.records.trace import DeviceKind, HostKind, Trace
from stepscope.step.cuda_graphs import NODE_SPACING, scale_node_spacing
from stepscope.step.graph import CallKind, Floats, Phase, StepGraph
from stepscope.step.replay import step_ns
from stepscope.step.work import named, one_of
from stepscope.text.figures import milliseconds
from stepscope.trace.links import distinct

# Removes the profiler's cost from the host's time before a step is replayed.
#
# Recording an operator takes time and fills the caches. The trace itself shows how much: operators
# that only call another (aten::t calls aten::transpose) take as long as their recording does. So
# the host's time is shortened by a factor that depends on how long those took, minus a little for
# every recorded Python function. Most of these operators belong to backward, which has a thread of
# its own. How fast a thread was during recording also shows in its kernel launches, so each phase's
# launches influence its factor. Kernels of a CUDA graph have a rule of their own
# (cuda_graphs.py). The constants were fitted to steps timed with and without the profiler on
# H200 machines (docs/records/predictions.md has the table, and the error on models left out of the
# fit).
#
# If a run measured its own steps without the profiler, those decide (measured.py).

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
        # By how much tasks had to become longer than the trace has them, as a logarithm.
        before, after = (float(graph.tasks.dur_ns.sum()) for graph in (lighter, fitted))
        return Corrected(
            graph=fitted,
            step_ns=step_ns(fitted),
            low_ns=float(truth.step_ns),
            high_ns=float(truth.step_ns),
            basis="measured",
            spread=BETWEEN_RUNS,
            host_measured=bool(truth.host_ns),
            unexplained=max(0.0, float(np.log(after / before))) if before and after else 0.0,
        )
    return Corrected(
        graph=lighter,
        step_ns=step_ns(lighter),
        low_ns=_at_deviations(scale_node_spacing(host, trace, 0.0), -NORMAL_95 * spread),
        high_ns=_at_deviations(host, NORMAL_95 * spread),
        basis="calibrated",
        spread=spread,
    )


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
    whole = round(recorded_ns)
    fitted, _ = fit_to(
        graph,
        MeasuredSteps(
            steps=1, steps_ns=(whole,), step_ns=whole, wall_ns=whole, device_ns=None, phases_ns={}
        ),
    )
    spread = float(np.hypot(WITH_SHAPES.spread, UNKNOWN_SPEED))
    return Corrected(
        graph=fitted,
        step_ns=step_ns(fitted),
        low_ns=_at_deviations(fitted, -NORMAL_95 * spread),
        high_ns=recorded_ns,
        basis="profiled",
        spread=spread,
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
    return min(max(float(np.exp(median(logs))), _FASTEST), _SLOWEST) if logs else None


# The profiler's cost on a CPU: a fixed amount for every operator and Python function.
#
# On a CPU operators are long and their own time is real work, so no one factor fits all; recording
# costs the same for each event. Operators that only call another show how much (see
# overhead.find_slowness): an event costs 1.8 µs when those take as long as usual, with shapes or
# without, and otherwise in proportion. Fitted to five models (two MLPs, a convolution net, a
# transformer, an LSTM) timed with and without the profiler; the table is in
# docs/records/predictions.md.

OPERATOR_NS = 1_800.0
FRAME_NS = 1_500.0
# Assumed if the trace does not show it: recording shapes slows such operators down.
_SLOWNESS = {True: 1.3, False: 0.82}
_SPREAD, _SPREAD_UNKNOWN = 0.22, 0.4  # of the cost, one standard deviation
_MOST = 0.8  # of a call's or a gap's time


def runs_on_host(trace: Trace) -> bool:
    """The CPU is the device: no kernel, copy or memset was recorded."""
    return not bool((trace.device.kind <= DeviceKind.MEMSET).any())


def event_cost_ns(trace: Trace, slowness: float | None) -> float:
    """What recording one operator cost."""
    return _slow(trace, slowness) * OPERATOR_NS


def _slow(trace: Trace, slowness: float | None) -> float:
    return slowness or _SLOWNESS[bool(trace.facts.get("record_shapes", True))]


def without_profiler_on_cpu(
    graph: StepGraph, trace: Trace, slowness: float | None
) -> tuple[StepGraph, float]:
    """The step without the recording's cost, and the spread of the log of the host's time."""
    slow = _slow(trace, slowness)
    calls = graph.calls
    if not len(calls):
        return graph, 0.0
    operators, frames = (
        _events_of(trace, graph, kind) for kind in (HostKind.OPERATOR, HostKind.PYTHON)
    )
    cost = slow * (OPERATOR_NS * operators + FRAME_NS * frames)
    own = np.minimum(cost, _MOST * calls.call_ns)
    before = np.minimum(cost - own, _MOST * calls.gap_ns)
    call_ns, gap_ns, none = calls.call_ns - own, calls.gap_ns - before, np.zeros(len(calls))
    lighter = replace(graph, calls=replace(calls, call_ns=call_ns, gap_ns=gap_ns, frames=none))
    spread = _SPREAD if slowness else _SPREAD_UNKNOWN
    taken = float(own.sum() + before.sum())
    return lighter, spread * taken / max(lighter.host_ns, 1.0)


def _events_of(trace: Trace, graph: StepGraph, kind: HostKind) -> NDArray[np.float64]:
    """Events that began between each call and the next; inside it for the last call."""
    host, calls = trace.host, graph.calls
    real = np.flatnonzero((calls.row >= 0) & (calls.kind != CallKind.WAIT))
    out = np.zeros(len(calls))
    if not len(real):
        return out
    rows = calls.row[real]
    start = host.start_ns[rows]
    last = start[-1] + host.dur_ns[rows[-1]]
    chosen = (host.kind == kind) & np.isin(host.thread, distinct(host.thread[rows]))
    begun = np.sort(host.start_ns[chosen])
    place = np.searchsorted(begun, np.append(start, last))
    out[real] = np.diff(place)
    return out


# Fits a step to what the same run measured without the profiler.
#
# First the host's time, phase by phase, if the run measured it: steps whose host ran ahead of the
# device show how long the host needs when nothing holds it up, even if the device decides the step.
# Then the step as a whole.

# The device decides a step this close to what the device alone needs.
_DEVICE_BOUND = 1.02
# The host decides a longer one, if the host may be this much slower than assumed, or if the device
# would have to be slower than kernels vary from step to step.
_SLOWER_MEASURED, _SLOWER_CALIBRATED, _SLOWER_DEVICE = 1.1, 1.25, 1.1
_KERNELS_VARY = 0.02  # by how much kernels of the measured steps may be shorter than traced ones
_MOST_SCALE, _HALVINGS = 64.0, 20
# The main thread's parts are fitted together: scripts differ in what they do in which.
_PARTS = (
    (("backward",), (Phase.BACKWARD,)),
    (("optimizer",), (Phase.OPTIMIZER,)),
    (("forward", "data", "other"), (Phase.FORWARD, Phase.DATA, Phase.OTHER)),
)
_LEAST_FACTOR, _MOST_FACTOR = 0.15, 3.0  # further off, the trace divides the phases differently


def fit_to(graph: StepGraph, truth: MeasuredSteps) -> tuple[StepGraph, float]:
    """The step as measured, and the factor on the host's time after its phases were fitted.

    If the device alone needs about that long, the step says nothing about the host: the host's time
    stays, and the device's is scaled until the step is as long as measured. A host that leaves no
    room for that was slower in the trace, and is scaled.
    """
    measured = float(truth.step_ns)
    graph = _phase_by_phase(graph, truth.host_ns)
    floor = step_ns(scale_host(graph, 0.0))
    if measured > floor * _DEVICE_BOUND:
        fitted = graph if truth.host_ns else _phase_by_phase(graph, truth.phases_ns)
        scale = _host_scale(fitted, measured)
        likely = scale < (_SLOWER_MEASURED if truth.host_ns else _SLOWER_CALIBRATED)
        if likely or measured > floor * _SLOWER_DEVICE:
            return scale_host(fitted, scale), scale
    longest = measured / floor
    shortest = min(1.0, longest) * (1.0 - _KERNELS_VARY)
    device = _smallest_factor(partial(_with_device, graph), measured, shortest, longest)
    fitted = _with_device(graph, device)
    if device > shortest or step_ns(fitted) <= measured:
        return fitted, 1.0
    scale = _host_scale(fitted, measured)  # the host cannot have been slower than this
    return scale_host(fitted, scale), scale


def scale_host(graph: StepGraph, factor: float) -> StepGraph:
    return replace(_scale_calls(graph, factor), end_ns=factor * graph.end_ns)


def _scale_calls(graph: StepGraph, factor: float | Floats) -> StepGraph:
    calls = graph.calls
    scaled = replace(calls, gap_ns=factor * calls.gap_ns, call_ns=factor * calls.call_ns)
    return replace(graph, calls=scaled)


def _phase_by_phase(graph: StepGraph, measured_ns: Mapping[str, int]) -> StepGraph:
    """Unchanged for a host that computes itself: its phases contain waits for other ranks."""
    calls = graph.calls
    if not (calls.kind == CallKind.LAUNCH).any():
        return graph
    now = calls.gap_ns + calls.call_ns
    factor = np.ones(len(calls))
    for names, phases in _PARTS:
        chosen = np.isin(calls.phase, phases)
        target, have = sum(measured_ns.get(name, 0) for name in names), float(now[chosen].sum())
        if target and have and _LEAST_FACTOR < target / have < _MOST_FACTOR:
            factor[chosen] = target / have
    return _scale_calls(graph, factor)


def _with_device(graph: StepGraph, factor: float) -> StepGraph:
    tasks = graph.tasks
    shorter = replace(tasks, dur_ns=tasks.dur_ns * factor, spacing_ns=tasks.spacing_ns * factor)
    return replace(graph, tasks=shorter)


def _host_scale(graph: StepGraph, measured_ns: float) -> float:
    """The smallest factor of the host's time that makes the step as long."""
    low, high = 0.0, 1.0
    while step_ns(scale_host(graph, high)) < measured_ns and high < _MOST_SCALE:
        low, high = high, 2 * high
    return _smallest_factor(partial(scale_host, graph), measured_ns, low, high)


def _smallest_factor(
    scaled: Callable[[float], StepGraph], measured_ns: float, low: float, high: float
) -> float:
    """Between `low` and `high`, the smallest one with which the step is as long as measured."""
    if step_ns(scaled(low)) >= measured_ns:
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if step_ns(scaled(middle)) < measured_ns:
            low = middle
        else:
            high = middle
    return high
