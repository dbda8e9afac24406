"""What the profiler itself cost the host, taken out of a step before it is replayed.

Recording makes some of the host's time longer than the rest: operators (their inputs are looked at),
calls into the device's runtime (CUPTI listens in), and Python functions where stacks were recorded;
Python between operators hardly. It also makes everything slower by crowding the caches, by how much
shows in what a launch took. The constants were fitted to steps timed with and without the profiler on
H200 machines (docs/accuracy.md has the table, and the error on models left out of the fit).

Where a run measured its own steps without the profiler, those decide: the host's time is brought to
where the replayed step is the measured one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.predict.graph import CallKind
from stepscope.predict.replay import step_ns

if TYPE_CHECKING:
    from typing import Literal

    from stepscope.predict.graph import StepGraph

USUAL_LAUNCH_NS = 6_000.0
# A launch twice as slow or fast as any seen says more about the machine than about the profiler.
_SLOWEST, _FASTEST = 1.6, 0.7


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Time without the profiler over time with it, by what the host was doing."""

    python: float = 0.93
    operators: float = 0.70
    runtime: float = 0.42
    frame_ns: float = 1_530.0  # a recorded Python function
    slowness: float = -0.65  # power of (a launch's time / the usual one)
    spread: float = 0.065  # of the logarithm of the host's time, one standard deviation


WITH_SHAPES = Rates()
# Without shapes recording costs half: 1.2 instead of 1.4 on a CPU's operators. Not fitted on a GPU.
WITHOUT_SHAPES = Rates(operators=0.83, spread=0.1)


class Corrected(msgspec.Struct, frozen=True, kw_only=True):
    """A step without the profiler's cost, and how far off that may be."""

    graph: StepGraph
    step_ns: float
    low_ns: float
    high_ns: float
    basis: Literal["measured", "calibrated"]
    host_scale: float  # of the host's time, after the correction


def correct(
    graph: StepGraph, *, shapes: bool = True, measured_ns: float | None = None
) -> Corrected:
    """By the measured step where there is one, else by the calibrated constants."""
    rates = WITH_SHAPES if shapes else WITHOUT_SHAPES
    lighter = without_profiler(graph, rates)
    if measured_ns is not None:
        return _fitted(lighter, measured_ns)
    low, high = (
        step_ns(scale_host(lighter, float(np.exp(sign * 1.96 * rates.spread)))) for sign in (-1, 1)
    )
    return Corrected(
        graph=lighter,
        step_ns=step_ns(lighter),
        low_ns=low,
        high_ns=high,
        basis="calibrated",
        host_scale=lighter.host_ns / graph.host_ns if graph.host_ns else 1.0,
    )


def without_profiler(graph: StepGraph, rates: Rates = WITH_SHAPES) -> StepGraph:
    """The host's time as the constants say it would have been. Device times stay."""
    calls = graph.calls
    launching = calls.kind != CallKind.PLAIN
    if not launching.any():
        return graph
    slow = _slowness(graph) ** rates.slowness
    python = np.maximum(calls.gap_ns - calls.operators_ns - calls.runtime_ns, 0.0)
    python = np.maximum(rates.python * python - rates.frame_ns * calls.frames, 0.2 * python)
    operators, runtime = rates.operators * calls.operators_ns, rates.runtime * calls.runtime_ns
    gaps = np.minimum(python + operators + runtime, calls.gap_ns)
    return replace(
        graph,
        calls=replace(
            calls,
            gap_ns=slow * gaps,
            operators_ns=slow * operators,
            runtime_ns=slow * runtime,
            call_ns=slow * rates.runtime * calls.call_ns,
            frames=np.zeros(len(calls)),
        ),
        end_ns=slow * rates.python * graph.end_ns,
    )


def scale_host(graph: StepGraph, factor: float) -> StepGraph:
    """All of the host's time by one factor."""
    calls = graph.calls
    names = ("gap_ns", "operators_ns", "runtime_ns", "call_ns")
    scaled = {name: factor * getattr(calls, name) for name in names}
    return replace(graph, calls=replace(calls, **scaled), end_ns=factor * graph.end_ns)


def _slowness(graph: StepGraph) -> float:
    calls = graph.calls
    launches = calls.call_ns[calls.kind == CallKind.LAUNCH]
    if not len(launches):
        return 1.0
    found = float(np.quantile(launches, 0.25)) / USUAL_LAUNCH_NS
    return min(max(found, _FASTEST), _SLOWEST)


def _fitted(graph: StepGraph, measured_ns: float) -> Corrected:
    """The host's time scaled until the replayed step is the measured one.

    A step that the device alone makes longer than measured cannot be mended by the host: its device
    times are scaled then, and say so by a host scale of 0.
    """
    low, high = 0.0, 1.0
    while step_ns(scale_host(graph, high)) < measured_ns and high < 64:
        low, high = high, 2 * high
    for _ in range(24):
        middle = (low + high) / 2
        if step_ns(scale_host(graph, middle)) < measured_ns:
            low = middle
        else:
            high = middle
    fitted = scale_host(graph, high)
    return Corrected(
        graph=fitted,
        step_ns=step_ns(fitted),
        low_ns=measured_ns,
        high_ns=measured_ns,
        basis="measured",
        host_scale=high,
    )
