"""Which plan to try after one whose steps took longer than allowed.

Whether the device, the host or both made the steps longer is not known. What is: a plan that asks
less of each of them takes less time. So the next one may ask, of both, for a part of what the slow
one did, as large a part as the times of all plans so far allow; and nothing that was tried is
forgotten: the one that fits and saves most stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from stepscope.fix.saved.choose import plan_nothing, plan_step
from stepscope.fix.saved.plan_load import NO_LOAD
from stepscope.fix.saved.time_limit import is_too_slow
from stepscope.records.figures import percent

if TYPE_CHECKING:
    from stepscope.fix.saved.choose import PlannedStep
    from stepscope.fix.saved.step_record import StepRecord
    from stepscope.fix.saved.time_limit import AddedTime
    from stepscope.records.memory_targets import MemoryTarget

MOST_TRIES = 5  # plans
_AIM = 0.95  # of the time allowed
_ENOUGH = 0.8  # of it: a plan that takes so much is not made again
_TOLERATED = 0.02  # of a step, where no plan fits: to save nothing would be worse
_LEAST_SHARE, _MOST_SHARE = 0.1, 0.9  # of the way between two plans
_DEARER = 1.35  # by which operators take longer beside others; beyond, it is the host
_BETTER = 0.98  # of the peak: less saved is not worth another try
_SMALLER_LIMIT = 3


@dataclass(frozen=True, slots=True)
class TriedPlan:
    planned: PlannedStep
    added: AddedTime

    @property
    def peak_bytes(self) -> int:
        return _peak_bytes(self.planned)

    @property
    def held_up_host(self) -> bool:
        return self.added.added_ns > _DEARER * self.planned.plan.extra_ns


@dataclass(frozen=True, slots=True)
class Verdict:
    """The plan to follow next; `decided`: from now on."""

    record: StepRecord
    planned: PlannedStep
    decided: bool
    said: str | None = None
    gave_up: bool = False


@dataclass(slots=True)
class PlanTries:
    """For inputs of one kind."""

    target: MemoryTarget
    tried: list[TriedPlan] = field(default_factory=list)
    _tried_smaller_limit: bool = False

    def judge(self, record: StepRecord, planned: PlannedStep, added: AddedTime) -> Verdict:
        """`record` with what earlier verdicts made of it; the steps of `planned` took `added`."""
        self.tried.append(TriedPlan(planned, added))
        if len(self.tried) == 1 and self._fits(self.tried[0]):
            return Verdict(record, planned, True)
        said = f"steps took {percent(added.share)} longer than plain ones"
        following = self._following(record) if len(self.tried) < MOST_TRIES else None
        if following is None:
            return self._ended(record, said)
        why = ", as the host cannot keep up" if self.tried[-1].held_up_host else ""
        if self._fits(self.tried[-1]):
            why = f" of the {percent(self.target.max_slowdown or 0.0)} allowed"
        return Verdict(*following, False, f"{said}{why}: planned again")

    def _fits(self, one: TriedPlan) -> bool:
        return not is_too_slow(one.added, self.target)

    @property
    def _best(self) -> TriedPlan | None:
        fitting = [one for one in self.tried if self._fits(one)]
        return min(fitting, key=lambda one: one.peak_bytes, default=None)

    @property
    def _least_slow(self) -> TriedPlan:
        slow = [one for one in self.tried if not self._fits(one)]
        return min(slow, key=lambda one: one.added.share)

    def _following(self, record: StepRecord) -> tuple[StepRecord, PlannedStep] | None:
        lighter = self._lighter(record)
        if lighter is not None:
            compared = self.tried[-1].planned.compared
            planned = plan_step(lighter, self.target, compared=compared)
            if self._is_promising(planned):
                return lighter, planned
        if not self._tried_smaller_limit:
            self._tried_smaller_limit = True
            planned = self._for_smaller_limit(record)
            host_ns = self._least_slow.planned.load.host_ns
            if planned.load.host_ns <= host_ns and self._is_promising(planned):
                return record, planned
        return None

    def _lighter(self, record: StepRecord) -> StepRecord | None:
        """The record with limits for the next plan, between the best one that fits and the one
        that is least too slow; None where the best takes about as long as it may."""
        most, best, slow = self.target.max_slowdown or 0.0, self._best, self._least_slow
        share = self._secant_share(best, slow)
        if best is not None and best is self.tried[-1]:
            if best.added.share >= _ENOUGH * most or self._meets_bytes(best):
                return None
            share = (share + self._proportional_share(best, slow)) / 2
        base = NO_LOAD if best is None else best.planned.load
        load = base.towards(slow.planned.load, share)
        waits = any(one.planned.waits and one.held_up_host for one in self.tried)
        return replace(
            record,
            dearer=most * record.step_ns / max(1, load.device_ns) if most else record.dearer,
            most_host_ns=load.host_ns,
            may_wait=not waits,
        )

    def _secant_share(self, best: TriedPlan | None, slow: TriedPlan) -> float:
        """Of the way from the best to the slow one, if what lies between takes a time between."""
        aim = _AIM * (self.target.max_slowdown or 0.0)
        low = 0.0 if best is None else best.added.share
        return _between_plans((aim - low) / max(1e-9, slow.added.share - low))

    def _proportional_share(self, best: TriedPlan, slow: TriedPlan) -> float:
        """If only the slow plan was held up, and times grow as those of the best one."""
        aim = _AIM * (self.target.max_slowdown or 0.0)
        ours, theirs = best.planned.load.device_ns, slow.planned.load.device_ns
        if best.added.share <= 0 or theirs <= ours:
            return _MOST_SHARE
        return _between_plans((aim / best.added.share - 1) * ours / (theirs - ours))

    def _for_smaller_limit(self, record: StepRecord) -> PlannedStep:
        """What a user who allows less time gets first: who allows more is to get no worse plan."""
        record = replace(record, dearer=1.0, most_host_ns=None, may_wait=True)
        smaller = replace(
            self.target, max_slowdown=(self.target.max_slowdown or 0.0) / _SMALLER_LIMIT
        )
        compared = self.tried[0].planned.compared
        planned = plan_step(record, smaller, compared=compared, searching=False)
        return replace(planned, plan=replace(planned.plan, target=self.target.text))

    def _is_promising(self, planned: PlannedStep) -> bool:
        plan, best = planned.plan, self._best
        if not plan.changes_something():
            return False
        if best is not None and _peak_bytes(planned) > _BETTER * best.peak_bytes:
            return False
        done = (plan.uses, plan.repeated, plan.results)
        plans = (one.planned.plan for one in self.tried)
        return all(done != (other.uses, other.repeated, other.results) for other in plans)

    def _meets_bytes(self, one: TriedPlan) -> bool:
        target = self.target
        limits = target.budget_bytes, target.reduce, target.batch
        return one.planned.meets_target and any(limit is not None for limit in limits)

    def _ended(self, record: StepRecord, said: str) -> Verdict:
        chosen = self._best or self._least_slow
        if is_too_slow(chosen.added, self.target, doubt=_TOLERATED):
            said = (
                f"{said}: everything is kept from now on. Where training waits for the host, "
                "capture a CUDA graph, or train with a larger batch"
            )
            return Verdict(record, plan_nothing(record, self.target, said), True, said, True)
        if chosen is self.tried[-1]:
            return Verdict(record, chosen.planned, True)
        slower = percent(chosen.added.share)
        return Verdict(
            record, chosen.planned, True, f"{said}: the plan that took {slower} longer stays"
        )


def _between_plans(share: float) -> float:
    return min(_MOST_SHARE, max(_LEAST_SHARE, share))


def _peak_bytes(planned: PlannedStep) -> int:
    plan = planned.plan
    return plan.peak_bytes if plan.step_peak_bytes is None else plan.step_peak_bytes
