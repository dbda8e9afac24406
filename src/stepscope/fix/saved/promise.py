"""What a plan promises: peak memory and time of a step, with intervals.

The allocator's readings of the recorded pass's backward hold everything that is there anyway:
weights, gradients, the batch, outputs, the loss. The plan changes only what is kept and made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.records.figures import duration, percent, size

if TYPE_CHECKING:
    from stepscope.fix.saved.choose import PlannedStep
    from stepscope.fix.saved.time_limit import AddedTime

_GUESSED_DOUBT = 0.30  # of a step that was worked out from its forward pass
_STEP_DOUBT = 0.03  # of a measured one


@dataclass(frozen=True, slots=True)
class _Spread:
    """What was measured, over what was promised."""

    peak: tuple[float, float]
    extra: tuple[float, float]  # of what recomputing and encoding add to a step


# On CPUs: benchmarks/measured/save_memory_residuals_cpu.json, the range of eight trainings.
_ON_CPU = _Spread(peak=(0.99, 1.04), extra=(0.95, 1.71))
# On GPUs: benchmarks/measured/save_memory_h200.json, plans for 5%. Unread ones are a guess.
_READ = _Spread(peak=(0.96, 1.04), extra=(0.5, 1.6))  # the recorded step's backward was read
_UNREAD = _Spread(peak=(0.90, 1.10), extra=(0.5, 1.6))


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePromise:
    """Of one step with the plan. Peaks are of the whole step if `whole_step`, else of what backward
    keeps; times are of a step if `measured_step`, else worked out from the forward pass. Once the
    plan was tried (`tried_step`), the step is what its first steps took, and `planned_step_ns` what
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
    planned: PlannedStep, *, step_ns: int | None = None, added: AddedTime | None = None
) -> SavePromise:
    """`step_ns` is what a step without the plan took; `added` what the plan's own steps took over
    that, when it was tried."""
    plan = planned.plan
    before, after, spread = _peaks(planned)
    least = plan.saved_bytes if plan.step_peak_bytes is None else 0
    base_ns = step_ns or plan.step_ns
    planned_ns, low_ns, high_ns = _planned_step(planned, spread, step_ns)
    tried_ns = planned_ns
    if added is not None:
        base_ns, tried_ns = added.plain_ns, added.followed_ns
        doubt_ns = max(added.doubt_ns, _STEP_DOUBT * tried_ns)
        low_ns, high_ns = tried_ns - doubt_ns, tried_ns + doubt_ns
    return SavePromise(
        peak_bytes_before=before,
        peak_bytes=after,
        peak_low_bytes=max(least, round(after * spread.peak[0])),
        peak_high_bytes=round(after * spread.peak[1]),
        step_ns_before=base_ns,
        step_ns=tried_ns,
        step_low_ns=round(low_ns),
        step_high_ns=round(high_ns),
        whole_step=plan.step_peak_bytes is not None,
        measured_step=step_ns is not None or added is not None,
        planned_step_ns=planned_ns,
        tried_step=added is not None,
    )


def _planned_step(
    planned: PlannedStep, spread: _Spread, step_ns: int | None
) -> tuple[int, float, float]:
    """With its interval. The host may need longer than the device: more than its slack."""
    plan = planned.plan
    base_ns = step_ns or plan.step_ns
    doubt = _STEP_DOUBT if step_ns else _GUESSED_DOUBT
    extra_ns = max(plan.extra_ns, planned.host_late_ns)
    return (
        base_ns + extra_ns,
        base_ns * (1 - doubt) + spread.extra[0] * plan.extra_ns,
        base_ns * (1 + doubt) + spread.extra[1] * extra_ns,
    )


def _peaks(planned: PlannedStep) -> tuple[int, int, _Spread]:
    """Without and with the plan, and how far the latter may be off."""
    plan = planned.plan
    if plan.step_peak_bytes is None or plan.step_peak_bytes_before is None:
        return plan.peak_bytes_before, plan.peak_bytes, _ON_CPU
    spread = _READ if planned.read else _UNREAD
    return plan.step_peak_bytes_before, plan.step_peak_bytes, spread
