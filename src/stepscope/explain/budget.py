"""The step of record: measured without the profiler, else corrected for it; divided by the
trace; and longer where a step does more work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.records.explanation import Basis, Budget, Part, StepTime
from stepscope.records.normal import median
from stepscope.records.rank import MeasuredSteps
from stepscope.records.run import RankRun
from stepscope.step.statistics import mean_interval
from stepscope.step.steps import step_of

if TYPE_CHECKING:
    from stepscope.explain.rank_analysis import RankAnalysis

# The profiler slows the host and leaves kernels as they are. So its cost is subtracted from its own
# work first, then from the host's share of the step: from operators and Python in proportion, since
# the trace does not show which of them it slowed. On the CPU the operators themselves are slowed,
# and shrink with the Python between them; waiting for data or other ranks stays as it is. A larger
# difference has other causes: then all parts shrink in proportion.

_HOST_PARTS = ("operators", "python")
_CPU_PARTS = ("compute", *_HOST_PARTS)
_BETWEEN_KERNELS = ("idle_launch", "idle_other")
_MOST_OVERHEAD = 0.5  # of the CPU's own time: profilers that double the step were seen


def with_measured(
    step: StepTime, measured: MeasuredSteps | None, run: RankRun | None = None
) -> StepTime:
    """Add the measured step, the mean of the run's steady ones: nothing is left to correct."""
    if run is not None and run.times is not None:
        times = run.times
        return replace(
            step,
            truth=times.mean_ms,
            corrected=times.mean_ms,
            low=times.low_ms,
            high=times.high_ms,
            mean=times.mean_ms,
            median=times.median_ms,
            p99=times.p99_ms,
        )
    if measured is None:
        return step
    low, high = mean_interval(np.array(measured.steps_ns or (measured.step_ns,), np.float64))
    ms = measured.step_ns / 1e6
    return replace(step, truth=ms, corrected=ms, low=min(low / 1e6, ms), high=max(high / 1e6, ms))


def with_correction(step: StepTime, analysis: RankAnalysis) -> StepTime:
    """Subtract the profiler's cost, unless the step was measured or the cost is not known."""
    corrected = analysis.corrected if step.corrected is None else None
    if corrected is None:
        return step
    return replace(
        step,
        corrected=corrected.step_ns / 1e6,
        low=corrected.low_ns / 1e6,
        high=corrected.high_ns / 1e6,
    )


def with_host(step: StepTime, analysis: RankAnalysis) -> StepTime:
    """Add the host's own time, if the run measured it."""
    own_ns = sum(analysis.host_phases_ns.values())
    return replace(step, host=own_ns / 1e6) if own_ns else step


def budget_of_record(
    budget: Budget,
    step: StepTime,
    *,
    run: RankRun | None = None,
    measured: MeasuredSteps | None = None,
    on_host: bool = False,
    graphs: bool = False,
) -> Budget:
    """Scale the profiled budget to the measured step, else to the corrected one.

    The window is divided like a typical step. The run's stalls are parts of their own, so all of
    them together are the mean step. A window that recorded stalls, or was lucky, does not know how
    long a typical step waits for data: the run does.
    """
    target, basis = _target(step)
    if target is None or not budget.step_ms:
        return budget
    stalls = stall_parts(run)
    typical = target - sum(part.ms for part in stalls)
    parts = _scale_parts(budget, typical, on_host=on_host, graphs=graphs)
    if parts is None:
        return budget
    if measured is not None and measured.data_ns is not None:
        wait = min(typical, measured.data_ns / 1e6)
        data = wait if on_host else _felt_wait(budget, parts, wait)
        whole, rest = sum(parts.values()), sum(parts.values()) - parts["data_loading"]
        scale = (whole - data) / rest if rest > 0 else 1.0
        parts = {name: data if name == "data_loading" else ms * scale for name, ms in parts.items()}
    scaled = (Part(id=name, ms=ms, share=ms / target) for name, ms in parts.items())
    return Budget(step_ms=target, parts=(*scaled, *stalls), basis=basis)


def stall_parts(run: RankRun | None) -> tuple[Part, ...]:
    """The parts of the mean step that stalls are, one for each cause."""
    return tuple(
        Part(id=f"stall_{stall.cause}", ms=stall.cost_ms, share=stall.share)
        for stall in (run.stalls if run else ())
        if stall.cost_ms > 0
    )


def _scale_parts(
    budget: Budget, target: float, *, on_host: bool, graphs: bool
) -> dict[str, float] | None:
    """The recorded parts without the profiler's cost, in ms; None if nothing is left.

    In CUDA graphs the profiler moves kernels apart: the idle time between them shrinks too.
    """
    ms = {part.id: part.ms for part in budget.parts}
    excess = _take(ms, ("profiler",), max(0.0, budget.step_ms - target))
    slowed = _CPU_PARTS if on_host else _HOST_PARTS
    if not on_host or excess <= _MOST_OVERHEAD * sum(ms[part] for part in slowed):
        excess = _take(ms, slowed, excess)
    if graphs:
        _take(ms, _BETWEEN_KERNELS, excess)
    whole = sum(ms.values())
    return {name: value * target / whole for name, value in ms.items()} if whole > 0 else None


def _felt_wait(budget: Budget, parts: dict[str, float], wait_ms: float) -> float:
    """What a device feels of the host's wait: it may have work queued. As much as the window shows,
    and at least as much as makes the typical step longer than the rest of the recorded one."""
    recorded = sum(part.ms for part in budget.parts if part.id != "data_loading")
    longer = sum(parts.values()) - recorded
    return min(wait_ms, max(parts["data_loading"], longer))


def _take(ms: dict[str, float], parts: tuple[str, ...], excess: float) -> float:
    """Shorten these parts in proportion, by `excess` if they are long enough; returns the rest."""
    total = sum(ms[part] for part in parts)
    factor = 1 - min(excess, total) / total if total else 1.0
    for part in parts:
        ms[part] *= factor
    return excess - (1 - factor) * total


def _target(step: StepTime) -> tuple[float | None, Basis]:
    if step.truth:
        return step.truth, "measured"
    if step.corrected and step.profiled and step.corrected < step.profiled:
        return step.corrected, "corrected"
    return None, "cycles"


# Steps that take longer because they do more work, as every fifth one of a GAN whose generator
# trains less often than its critic.
#
# Among a run's steps they look like stalls of no known cause. The trace shows that the device has
# more to do in them.

_MORE = 1.05  # times the median: a longer step has so much more work, in so many more tasks
_FEWEST = 3  # traced steps


def longer_work_ns(analysis: RankAnalysis) -> float:
    """What the device does more in a longer step than in a typical one; 0 if no traced step is
    longer for that reason, and on CPUs."""
    if analysis.work.on_host:
        return 0.0
    # The device's time for what each traced step launched, and how many tasks that is.
    trace, work, steps = analysis.trace, analysis.work, analysis.steps.steps
    operator = analysis.costs.operator[work.rows]
    known = operator >= 0
    number = step_of(steps, trace.host.start_ns[operator[known]])
    inside = (number >= 0) & (number < len(steps))
    dur_ns = (work.end_ns - work.start_ns)[known][inside].astype(np.float64)
    number = number[inside]
    work_ns, tasks = (
        np.bincount(number, dur_ns, minlength=len(steps)).astype(np.float64),
        np.bincount(number, minlength=len(steps)).astype(np.float64),
    )
    if len(work_ns) < _FEWEST:
        return 0.0
    usual_ns = median(work_ns)
    longer = (work_ns > _MORE * usual_ns) & (tasks > _MORE * median(tasks))
    return float(work_ns[longer].mean()) - usual_ns if longer.any() else 0.0


def periodic_work_ns(analysis: RankAnalysis, run: RankRun | None) -> float:
    """The same for a run in which something of no known cause comes at a fixed distance; else 0."""
    stalls = run.stalls if run else ()
    if not any(stall.cause == "unknown" and stall.period for stall in stalls):
        return 0.0
    return longer_work_ns(analysis)
