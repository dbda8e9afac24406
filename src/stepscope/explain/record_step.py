"""The step of record: measured without the profiler where the run has that, divided by the trace.

The profiler makes the host slower and leaves kernels as they are. So what the profiled step is too
long is taken from the host's idle parts first; only what they cannot give (as on the CPU, where the
operators themselves are slowed) is taken from all parts alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.records.explanation import Budget, Part, StepTime

if TYPE_CHECKING:
    from stepscope.records.truth import Truth

_HOST_PARTS = ("profiler", "operators", "python")


def with_truth(step: StepTime, truth: Truth | None) -> StepTime:
    """The measured step beside the profiled one."""
    return step if truth is None else replace(step, truth=truth.step_ns / 1e6)


def measured_budget(budget: Budget, truth: Truth | None) -> Budget:
    """The profiled budget brought to the measured step; unchanged without a truth."""
    if truth is None or not budget.step_ms:
        return budget
    target = truth.step_ns / 1e6
    ms = {part.id: part.ms for part in budget.parts}
    excess = max(0.0, budget.step_ms - target)
    for part in _HOST_PARTS:
        taken = min(excess, ms[part])
        ms[part] -= taken
        excess -= taken
    scale = target / (sum(ms.values()) or 1.0)
    return Budget(
        step_ms=target,
        parts=tuple(
            Part(id=name, ms=value * scale, share=value * scale / target)
            for name, value in ms.items()
        ),
        basis="measured",
    )
