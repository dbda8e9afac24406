"""Whether a step waits longer than the base's, however fast the processor is today.

How long a step waits of its own accord does not depend on the processor's clock, nor on other
programs (computing_and_waiting.py). So the difference is compared in milliseconds and given as a
share of today's step: its computing now, with the base's waiting. A longer wait is a slower step
unless the step computes less for it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stepscope.bench.compared_runs import (
    computing_kinds,
    has_parts,
    is_paced,
    kinds_change,
    others_explain,
)
from stepscope.bench.run_change import run_difference, typical_ms, typical_value
from stepscope.records.bench_comparison import StepPartChange
from stepscope.verify.change import Estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.bench_result import WorkloadResult


class PartChanges(NamedTuple):
    """What the two parts did; `together` is what both mean for the step, as a share of it."""

    waiting: StepPartChange
    computing: StepPartChange
    together: Estimate

    @property
    def decide(self) -> bool:
        """Whether the wait surely changed, and computing did not make up for it."""
        waits = self.waiting
        sure = waits.low > 0 or waits.high < 0
        return sure and self.together.value * waits.change > 0 and _is_sure(self.together)


def part_changes(
    then: WorkloadResult, now: WorkloadResult, *, comparisons: int
) -> PartChanges | None:
    """None where a side was not taken apart."""
    if not has_parts(then, now):
        return None
    computing_ms = [typical_ms(row.computing_ms) for row in (then, now)]
    waiting_ms = [typical_value(row.waiting_ms) for row in (then, now)]
    step_ms = computing_ms[1] + waiting_ms[0]
    waits = run_difference(then.waiting_ms, now.waiting_ms, step_ms, comparisons=comparisons)
    computes = _computing_change(then, now, comparisons)
    if waits is None or computes is None:
        return None
    return PartChanges(
        waiting=_part(waits, waiting_ms),
        computing=_part(relative(computes), computing_ms),
        together=_together(waits, computes, computing_ms[1], step_ms),
    )


def _computing_change(
    then: WorkloadResult, now: WorkloadResult, comparisons: int
) -> Estimate | None:
    """Not a sure one if other programs may have made it; a yardstick tells that."""
    change = kinds_change(computing_kinds(then, now), comparisons=comparisons)
    if change is None or is_paced(then, now) or not others_explain(then, now, change):
        return change
    return msgspec.structs.replace(change, low=min(change.low, 0.0), high=max(change.high, 0.0))


def _together(waits: Estimate, computes: Estimate, computing_ms: float, step_ms: float) -> Estimate:
    """Computing counts only where it surely changed. The step it is a share of is today's, as the
    base's program would take it."""
    if not _is_sure(computes):
        return waits
    like_base_ms = computing_ms * (math.exp(-computes.value) - 1) + step_ms
    waits_scale = step_ms / like_base_ms
    computes_scale = (like_base_ms - (step_ms - computing_ms)) / like_base_ms
    value = waits.value * waits_scale + math.expm1(computes.value) * computes_scale
    reach = math.hypot(_reach(waits) * waits_scale, _reach(computes) * computes_scale)
    return Estimate(value=value, low=value - reach, high=value + reach, smallest=waits.smallest)


def _reach(change: Estimate) -> float:
    return max(change.high - change.value, change.value - change.low)


def _is_sure(change: Estimate) -> bool:
    return change.low > 0 or change.high < 0


def relative(change: Estimate) -> Estimate:
    """Shares instead of logarithms."""
    return Estimate(
        value=math.expm1(change.value),
        low=math.expm1(change.low),
        high=math.expm1(min(change.high, 700.0)),
        smallest=math.expm1(min(change.smallest, 700.0)),
    )


def _part(change: Estimate, base_and_now_ms: Sequence[float]) -> StepPartChange:
    base_ms, now_ms = base_and_now_ms
    return StepPartChange(
        base_ms=base_ms,
        now_ms=now_ms,
        change=change.value,
        low=change.low,
        high=change.high,
        smallest_detectable=change.smallest,
    )
