"""What a plan promises: peak memory and time of a step, with intervals.

The allocator's readings of the recorded pass's backward hold everything that is there anyway:
weights, gradients, the batch, outputs, the loss. The plan changes only what is kept and made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.records.figures import duration, percent, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.fix.saved.choose import PlannedStep

# Measured promises on an H200 were used for neither yet: these are wide.
_PEAK_DOUBT = 0.04  # of the step, where its backward was read
_UNREAD_DOUBT = 0.10
_STEP_DOUBT = 0.03  # of a measured step
_GUESSED_DOUBT = 0.30  # of one that was worked out from its forward pass
_LEAST_EXTRA, _MOST_EXTRA = 0.5, 1.6  # times what recomputing is said to add


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePromise:
    """Of one step with the plan. Peaks are of the whole step if `whole_step`, else of what backward
    keeps; times are of a step if `measured_step`, else worked out from the forward pass."""

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

    def __str__(self) -> str:
        of = "The step's peak" if self.whole_step else "The peak of what backward keeps"
        slower = percent(self.step_ns / max(1, self.step_ns_before) - 1)
        return (
            f"{of} goes from {size(self.peak_bytes_before)} to {size(self.peak_bytes)} "
            f"({size(self.peak_low_bytes)} to {size(self.peak_high_bytes)}); a step takes "
            f"{duration(self.step_ns)} instead of {duration(self.step_ns_before)}, {slower} more "
            f"({duration(self.step_low_ns)} to {duration(self.step_high_ns)})."
        )


def promise(
    planned: PlannedStep,
    *,
    readings: Sequence[tuple[int, int]] = (),
    step_ns: int | None = None,
) -> SavePromise:
    """`readings` are uses in the order of backward, each with the bytes allocated just before it;
    `step_ns` is what a step without the plan took."""
    plan = planned.plan
    before, after, doubt = _peaks(planned, readings)
    low, high = 1 - doubt, 1 + doubt
    least = plan.saved_bytes if plan.step_peak_bytes is None else 0
    base_ns = step_ns or plan.step_ns
    base_doubt = _STEP_DOUBT if step_ns else _GUESSED_DOUBT
    return SavePromise(
        peak_bytes_before=before,
        peak_bytes=after,
        peak_low_bytes=max(least, round(after * low)),
        peak_high_bytes=round(after * high),
        step_ns_before=base_ns,
        step_ns=base_ns + plan.extra_ns,
        step_low_ns=round(base_ns * (1 - base_doubt) + _LEAST_EXTRA * plan.extra_ns),
        step_high_ns=round(base_ns * (1 + base_doubt) + _MOST_EXTRA * plan.extra_ns),
        whole_step=plan.step_peak_bytes is not None,
        measured_step=step_ns is not None,
    )


def _peaks(planned: PlannedStep, readings: Sequence[tuple[int, int]]) -> tuple[int, int, float]:
    """Without and with the plan, and the share by which the latter may be wrong."""
    plan = planned.plan
    if plan.step_peak_bytes is None or plan.step_peak_bytes_before is None:
        return plan.peak_bytes_before, plan.peak_bytes, _UNREAD_DOUBT
    if not readings or planned.making is None:
        return plan.step_peak_bytes_before, plan.step_peak_bytes, _UNREAD_DOUBT
    before = after = 0
    for number, allocated in readings:
        time = planned.times[number]
        there = allocated + planned.making[time]
        before = max(before, there)
        after = max(after, there - planned.before_levels[time] + planned.after_levels[time])
    return before, after, _PEAK_DOUBT
