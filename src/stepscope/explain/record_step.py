"""The step of record: measured without the profiler where the run has that, else corrected for it;
divided by the trace.

The profiler makes the host slower and leaves kernels as they are. So what the profiled step is too
long is taken from its own work, then from the host's idle parts, operators and Python alike: whose
it was nobody knows. On the CPU the operators themselves are slowed, and shrink with the Python
between them; waiting for data or for other ranks stays as it is. Steps that differ by more than
that differ by themselves: then all parts shrink alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.records.explanation import Budget, Part, StepTime

if TYPE_CHECKING:
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.records.explanation import Basis
    from stepscope.records.measured_steps import MeasuredSteps

_HOST_PARTS = ("operators", "python")
_CPU_PARTS = ("compute", *_HOST_PARTS)
_MOST = 0.5  # of the CPU's own time: a profiler that doubles the step has been seen


def with_truth(step: StepTime, truth: MeasuredSteps | None) -> StepTime:
    """The measured step beside the profiled one; nothing is left to correct then."""
    if truth is None:
        return step
    low, high = _median_interval(truth.steps_ns or (truth.step_ns,))
    ms = truth.step_ns / 1e6
    return replace(step, truth=ms, corrected=ms, low=min(low / 1e6, ms), high=max(high / 1e6, ms))


def with_correction(step: StepTime, analysis: RankAnalysis) -> StepTime:
    """The profiled step freed of the profiler's cost; as it is where a truth is there already, and
    where the trace does not tell that cost."""
    found = analysis.corrected if step.corrected is None else None
    if found is None:
        return step
    return replace(
        step,
        corrected=found.step_ns / 1e6,
        low=found.low_ns / 1e6,
        high=found.high_ns / 1e6,
    )


def budget_of_record(budget: Budget, step: StepTime, *, on_host: bool = False) -> Budget:
    """The profiled budget brought to the measured step, else to the corrected one."""
    target, basis = _target(step)
    if target is None or not budget.step_ms:
        return budget
    ms = {part.id: part.ms for part in budget.parts}
    excess = _take(ms, ("profiler",), max(0.0, budget.step_ms - target))
    slowed = _CPU_PARTS if on_host else _HOST_PARTS
    if not on_host or excess <= _MOST * sum(ms[part] for part in slowed):
        _take(ms, slowed, excess)
    whole = sum(ms.values())
    if not whole > 0:
        return budget
    scale = target / whole
    return Budget(
        step_ms=target,
        parts=tuple(
            Part(id=name, ms=value * scale, share=value * scale / target)
            for name, value in ms.items()
        ),
        basis=basis,
    )


def _take(ms: dict[str, float], parts: tuple[str, ...], excess: float) -> float:
    """Shorten these parts alike by so much at most; what is left to take."""
    there = sum(ms[part] for part in parts)
    left = 1 - min(excess, there) / there if there else 1.0
    for part in parts:
        ms[part] *= left
    return excess - (1 - left) * there


def _target(step: StepTime) -> tuple[float | None, Basis]:
    if step.truth:
        return step.truth, "measured"
    if step.corrected and step.profiled and step.corrected < step.profiled:
        return step.corrected, "corrected"
    return None, "cycles"


def _median_interval(times_ns: tuple[int, ...]) -> tuple[float, float]:
    """Where the median lies with 95%, by the ranks of the ordered steps."""
    ordered = np.sort(np.array(times_ns, np.float64))
    half = 0.98 * len(ordered) ** 0.5
    middle = (len(ordered) - 1) / 2
    places = np.clip([middle - half, middle + half], 0, len(ordered) - 1)
    low, high = np.interp(places, np.arange(len(ordered)), ordered)
    return float(low), float(high)
