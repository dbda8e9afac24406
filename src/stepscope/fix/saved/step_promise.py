"""What a plan promises: peak memory and time of a step, with intervals.

The allocator's readings of the recorded pass's backward hold everything that is there anyway:
weights, gradients, the batch, outputs, the loss. The plan changes only what is kept and made again.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.fix.saved.planner import PlannedStep
from stepscope.text.figures import duration, percent, size

_GUESSED_DOUBT = 0.30  # of a step that was worked out from its forward pass
_STEP_DOUBT = 0.03  # of a measured one
# Quantiles of what was measured, over what was promised. On CPUs:
# benchmarks/measured/save_memory_residuals_cpu.json, the range of eight trainings.
_PEAK_ON_CPU = (0.99, 1.04)
# On GPUs: benchmarks/measured/save_memory_h200.json. Unread ones are a guess.
_PEAK_READ, _PEAK_UNREAD = (0.96, 1.04), (0.90, 1.10)
_EXTRA = (0.5, 1.7)  # of what recomputing and encoding add to a step


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePromise:
    """Of one step with the plan. Peaks are of the whole step if `whole_step`, else of what backward
    keeps; times are of a step if `measured_step`, else worked out from the forward pass. Once the
    plan's steps were timed (`tried_step`), the step is what they took, and `planned_step_ns` what
    was planned before."""

    peak_bytes_before: int
    peak_bytes: int
    peak_low_bytes: int
    peak_high_bytes: int
    step_ns_before: int
    step_ns: int
    step_low_ns: int
    step_high_ns: int
    whole_step: bool
    measured_step: bool
    planned_step_ns: int = 0
    tried_step: bool = False

    def __str__(self) -> str:
        of = "The step's peak" if self.whole_step else "The peak of what is saved for backward"
        slower = percent(self.step_ns / max(1, self.step_ns_before) - 1)
        return (
            f"{of} goes from {size(self.peak_bytes_before)} to {size(self.peak_bytes)} "
            f"({size(self.peak_low_bytes)} to {size(self.peak_high_bytes)}). A step takes "
            f"{duration(self.step_ns)} instead of {duration(self.step_ns_before)}, {slower} "
            f"more ({duration(self.step_low_ns)} to {duration(self.step_high_ns)})."
        )


def promise(
    planned: PlannedStep, *, step_ns: int | None = None, tried_ns: int | None = None
) -> SavePromise:
    """`step_ns` is what a step without the plan took, `tried_ns` one with it."""
    plan = planned.plan
    before, after, spread = plan.peak_bytes_before, plan.peak_bytes, _PEAK_ON_CPU
    if plan.step_peak_bytes is not None and plan.step_peak_bytes_before is not None:
        before, after = plan.step_peak_bytes_before, plan.step_peak_bytes
        spread = _PEAK_READ if planned.read else _PEAK_UNREAD
    least = plan.saved_bytes if plan.step_peak_bytes is None else 0
    base_ns, doubt = step_ns or plan.step_ns, _STEP_DOUBT if step_ns else _GUESSED_DOUBT
    planned_ns = base_ns + plan.extra_ns
    low_ns = base_ns * (1 - doubt) + _EXTRA[0] * plan.extra_ns
    high_ns = base_ns * (1 + doubt) + _EXTRA[1] * plan.extra_ns
    if tried_ns is not None:
        low_ns, high_ns = (1 - _STEP_DOUBT) * tried_ns, (1 + _STEP_DOUBT) * tried_ns
    return SavePromise(
        peak_bytes_before=before,
        peak_bytes=after,
        peak_low_bytes=max(least, round(after * spread[0])),
        peak_high_bytes=round(after * spread[1]),
        step_ns_before=base_ns,
        step_ns=planned_ns if tried_ns is None else tried_ns,
        step_low_ns=round(low_ns),
        step_high_ns=round(high_ns),
        whole_step=plan.step_peak_bytes is not None,
        measured_step=step_ns is not None,
        planned_step_ns=planned_ns,
        tried_step=tried_ns is not None,
    )
