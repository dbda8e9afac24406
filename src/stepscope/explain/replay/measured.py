"""Fits a step to what the same run measured without the profiler.

First the host's time, phase by phase, if the run measured it: steps whose host ran ahead of the
device show how long the host needs when nothing holds it up, even if the device decides the step.
Then the step as a whole.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.graph import CallKind, Phase
from stepscope.explain.replay.schedule import step_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stepscope.explain.replay.graph import Floats, StepGraph
    from stepscope.records.measured_steps import MeasuredSteps

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
