"""The step of record: measured without the profiler, else corrected for it; divided by the trace.

The profiler slows the host and leaves kernels as they are. So its cost is subtracted from its own
work first, then from the host's share of the step: from operators and Python in proportion, since
the trace does not show which of them it slowed. On the CPU the operators themselves are slowed, and
shrink with the Python between them; waiting for data or other ranks stays as it is. A larger
difference has other causes: then all parts shrink in proportion.
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
_MOST_OVERHEAD = 0.5  # of the CPU's own time: profilers that double the step were seen


def with_measured(step: StepTime, measured: MeasuredSteps | None) -> StepTime:
    """Add the measured step: with it, nothing is left to correct."""
    if measured is None:
        return step
    low, high = _median_interval(measured.steps_ns or (measured.step_ns,))
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


def budget_of_record(budget: Budget, step: StepTime, *, on_host: bool = False) -> Budget:
    """Scale the profiled budget to the measured step, else to the corrected one."""
    target, basis = _target(step)
    if target is None or not budget.step_ms:
        return budget
    ms = {part.id: part.ms for part in budget.parts}
    excess = _take(ms, ("profiler",), max(0.0, budget.step_ms - target))
    slowed = _CPU_PARTS if on_host else _HOST_PARTS
    if not on_host or excess <= _MOST_OVERHEAD * sum(ms[part] for part in slowed):
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


def _median_interval(times_ns: tuple[int, ...]) -> tuple[float, float]:
    """The 95% interval of the median, by the ranks of the ordered steps."""
    ordered = np.sort(np.array(times_ns, np.float64))
    half = 0.98 * len(ordered) ** 0.5
    middle = (len(ordered) - 1) / 2
    places = np.clip([middle - half, middle + half], 0, len(ordered) - 1)
    low, high = np.interp(places, np.arange(len(ordered)), ordered)
    return float(low), float(high)
