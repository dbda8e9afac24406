"""Which plan to try after the steps of one were timed.

Whether the device, the host or both made steps longer is not known. What is: a plan that asks less
of each of them takes less time. So the next plan lies between the best one that fitted and the
least one that did not, by what they ask of both. Nothing that was tried is forgotten: the plan that
fits and saves most stays.

The steps of an accepted plan may become slower later, and plain ones to compare with are no longer
seen. Then a smaller plan tells: if its steps are no faster, the plan was not the reason, and the
larger one is followed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from stepscope.fix.saved.choose import plan_nothing, plan_step
from stepscope.fix.saved.plan_load import NO_LOAD
from stepscope.fix.saved.time_limit import is_too_slow
from stepscope.records.figures import duration, percent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.fix.saved.choose import PlannedStep
    from stepscope.fix.saved.plan_load import PlanLoad
    from stepscope.fix.saved.step_record import StepRecord
    from stepscope.fix.saved.time_limit import AddedTime
    from stepscope.records.memory_targets import MemoryTarget

MOST_TRIES = 7  # plans
_AIM = 0.95  # of the time allowed
_ENOUGH = 0.8  # of it: a plan that takes so much is not made again
_LEAST_SHARE, _MOST_SHARE = 0.1, 0.9  # of the way between two plans
_MOST_GROWTH = 2.0  # of what a plan asks of the device, where no plan was too slow yet
_DEARER = 1.35  # by which operators take longer beside others; beyond, something was waited for
_BETTER = 0.98  # of the peak: less saved is not worth another try
_SAME_PEAK = 1.005
_KEEPS_LESS = 0.95  # of what is kept: worth another try at the same peak
_STEPS = 4  # by which the way between two plans is walked until one is worth a try
_SMALLER_LIMIT = 3
_LATER_TRIES = 2  # plans after one whose steps became slower
_AS_PLANNED = 0.5  # of the device's time that a smaller plan leaves out: it was the plan


@dataclass(frozen=True, slots=True)
class TriedPlan:
    planned: PlannedStep
    added: AddedTime

    @property
    def peak_bytes(self) -> int:
        return _peak_bytes(self.planned)

    @property
    def held_up(self) -> bool:
        """It took longer than its operators do."""
        return self.added.added_ns > _DEARER * self.planned.plan.extra_ns

    @property
    def held_up_by_copies(self) -> bool:
        """The device waited for offloaded values for most of what the operators do not explain."""
        unexplained_ns = self.added.added_ns - self.planned.plan.extra_ns
        return self.held_up and 2 * self.added.waited_ns > unexplained_ns

    @property
    def held_up_host(self) -> bool:
        return self.held_up and not self.held_up_by_copies


@dataclass(frozen=True, slots=True)
class Verdict:
    """The plan to follow next; `decided`: from now on."""

    record: StepRecord
    planned: PlannedStep
    decided: bool
    said: str | None = None
    gave_up: bool = False
    added: AddedTime | None = None  # by the plan, where its steps were timed
    for_good: bool = False  # whatever its steps take later


@dataclass(slots=True)
class PlanTries:
    """For inputs of one kind."""

    target: MemoryTarget
    tried: list[TriedPlan] = field(default_factory=list)
    _tried_smaller_limit: bool = False
    _slowed: TriedPlan | None = None  # it had been accepted
    _most: int = MOST_TRIES

    def judge_again(self, record: StepRecord, planned: PlannedStep, added: AddedTime) -> Verdict:
        """The steps of an accepted plan have become too slow."""
        self.tried = [one for one in self.tried if one.planned is not planned]
        self._slowed = TriedPlan(planned, added)
        self._most = max(MOST_TRIES, len(self.tried) + 1 + _LATER_TRIES)
        return self.judge(record, planned, added)

    def judge(self, record: StepRecord, planned: PlannedStep, added: AddedTime) -> Verdict:
        """`record` with what earlier verdicts made of it; the steps of `planned` took `added`."""
        self.tried.append(TriedPlan(planned, added))
        said = f"steps took {percent(added.share)} longer than plain ones"
        slowed = self._slowed
        if slowed is not None and self._is_no_faster(slowed):
            said = (
                f"steps are slower than {percent(self._limit)} with a smaller plan, too. "
                "Something else takes longer, so the larger plan stays"
            )
            return Verdict(record, slowed.planned, True, said, added=slowed.added, for_good=True)
        following = self._following(record) if len(self.tried) < self._most else None
        if following is None:
            return self._ended(record, said)
        return Verdict(*following, False, f"{said}{self._why_again()}: planned again")

    def _is_no_faster(self, slowed: TriedPlan) -> bool:
        """The last plan, than that one: by less than half of what the device has to do less."""
        last = self.tried[-1]
        if last.planned is slowed.planned or self._fits(last):
            return False
        less_ns = slowed.planned.load.device_ns - last.planned.load.device_ns
        return slowed.added.followed_ns - last.added.followed_ns < _AS_PLANNED * less_ns

    def _why_again(self) -> str:
        last = self.tried[-1]
        if self._fits(last):
            return f" of the {percent(self._limit)} allowed"
        if last.held_up_by_copies:
            waited = duration(last.added.waited_ns)
            return f", because the GPU waited {waited} per step for offloaded values"
        return ", because the CPU cannot keep up" if last.held_up_host else ""

    @property
    def _limit(self) -> float:
        return self.target.max_slowdown or 0.0

    def _fits(self, one: TriedPlan) -> bool:
        return not is_too_slow(one.added, self.target)

    @property
    def _best(self) -> TriedPlan | None:
        """Of those that fitted, and of these with the least peak, that which keeps least."""
        fitting = [one for one in self.tried if self._fits(one)]
        most = _SAME_PEAK * min((one.peak_bytes for one in fitting), default=0)
        least = [one for one in fitting if one.peak_bytes <= most]
        return min(least, key=lambda one: one.planned.plan.saved_bytes, default=None)

    @property
    def _slow(self) -> TriedPlan | None:
        """The plan that asked least of those that were too slow. Plans that were held up by
        something that later ones leave out tell nothing about these, if there are others."""
        slow = [one for one in self.tried if not self._fits(one)]
        most = self.tried[0].planned.load
        ordinary = [one for one in slow if not self._is_excused(one)]
        return min(ordinary or slow, key=lambda one: one.planned.load.part_of(most), default=None)

    def _is_excused(self, one: TriedPlan) -> bool:
        waits = one.planned.waits and one.held_up
        return waits or (one.planned.offloads and one.held_up_by_copies)

    def _following(self, record: StepRecord) -> tuple[StepRecord, PlannedStep] | None:
        if self._is_enough():
            return None
        compared, searching = self.tried[-1].planned.compared, True
        for limited in self._limited(record):
            planned = plan_step(limited, self.target, compared=compared, searching=searching)
            if self._is_promising(planned):
                return limited, planned
            compared, searching = planned.compared, False
        if not self._tried_smaller_limit and self._slow is not None:
            self._tried_smaller_limit = True
            planned = self._for_smaller_limit(record)
            host_ns = self._slow.planned.load.host_ns
            if planned.load.host_ns <= host_ns and self._is_promising(planned):
                return record, planned
        return None

    def _is_enough(self) -> bool:
        """The best plan is the last one, and takes about as long as it may; or bytes are limited,
        and it keeps within them."""
        best = self._best
        if best is None or best is not self.tried[-1]:
            return False
        return best.added.most_share >= _ENOUGH * self._limit or self._meets_bytes(best)

    def _limited(self, record: StepRecord) -> Iterator[StepRecord]:
        """The record with limits for the next plan. Beside a plan that fits, each asks for more
        than the one before, as it has to save more; else for less."""
        best, slow = self._best, self._slow
        waits = any(one.planned.waits and one.held_up for one in self.tried)
        copies = any(one.planned.offloads and one.held_up_by_copies for one in self.tried)
        record = replace(record, may_wait=not waits, may_offload=not copies)
        if slow is None:
            if best is not None:
                growth = _MOST_GROWTH
                if best.added.most_share > 0:
                    growth = min(growth, _AIM * self._limit / best.added.most_share)
                yield self._grown(record, best.planned.load.times(growth))
            return
        base = NO_LOAD if best is None else best.planned.load
        share = self._share(best, slow)
        for _ in range(_STEPS):
            yield self._within(record, base.towards(slow.planned.load, share))
            share = share / 2 if best is None else (share + _MOST_SHARE) / 2

    def _within(self, record: StepRecord, load: PlanLoad) -> StepRecord:
        allowed_ns = self._limit * record.step_ns
        return replace(
            record,
            dearer=allowed_ns / max(1, load.device_ns) if self._limit else record.dearer,
            most_host_ns=load.host_ns,
        )

    def _grown(self, record: StepRecord, load: PlanLoad) -> StepRecord:
        """No plan was too slow: the host is limited only where its slack is known, and may have
        more than that seemed."""
        slack_ns = record.host_slack_ns
        most_ns = None
        if slack_ns is not None:
            most_ns = max(load.host_ns, slack_ns + round(self._limit * record.step_ns))
        return replace(self._within(record, load), most_host_ns=most_ns)

    def _share(self, best: TriedPlan | None, slow: TriedPlan) -> float:
        """Of the way from the best plan to the slow one. Its own waits are left out next time."""
        if self._is_excused(slow) and slow.planned.offloads and slow.held_up_by_copies:
            rest_ns = slow.added.added_ns - slow.added.waited_ns
            if rest_ns <= self._limit * slow.added.plain_ns:
                return 1.0
        share = self._secant_share(best, slow)
        if best is not None and best is self.tried[-1]:
            share = (share + self._proportional_share(best, slow)) / 2
        return share

    def _secant_share(self, best: TriedPlan | None, slow: TriedPlan) -> float:
        """If what lies between them takes a time between."""
        low = 0.0 if best is None else best.added.most_share
        return _between_plans((_AIM * self._limit - low) / max(1e-9, slow.added.most_share - low))

    def _proportional_share(self, best: TriedPlan, slow: TriedPlan) -> float:
        """If only the slow plan was held up, and times grow as those of the best one."""
        ours, theirs = best.planned.load.device_ns, slow.planned.load.device_ns
        if best.added.most_share <= 0 or theirs <= ours:
            return _MOST_SHARE
        growth = _AIM * self._limit / best.added.most_share
        return _between_plans((growth - 1) * ours / (theirs - ours))

    def _for_smaller_limit(self, record: StepRecord) -> PlannedStep:
        """What a user who allows less time gets first: who allows more is to get no worse plan."""
        record = replace(record, dearer=1.0, most_host_ns=None)
        smaller = replace(self.target, max_slowdown=self._limit / _SMALLER_LIMIT)
        compared = self.tried[0].planned.compared
        planned = plan_step(record, smaller, compared=compared, searching=False)
        return replace(planned, plan=replace(planned.plan, target=self.target.text))

    def _is_promising(self, planned: PlannedStep) -> bool:
        plan, best = planned.plan, self._best
        if not plan.changes_something():
            return False
        if best is not None and not _is_better(planned, best):
            return False
        done = (plan.uses, plan.repeated, plan.results)
        plans = (one.planned.plan for one in self.tried)
        return all(done != (other.uses, other.repeated, other.results) for other in plans)

    def _meets_bytes(self, one: TriedPlan) -> bool:
        return one.planned.meets_target and self.target.limits_bytes

    def _ended(self, record: StepRecord, said: str) -> Verdict:
        chosen = self._best
        if chosen is None:
            heavy = "" if self.target.heavy else ", or try heavy=True"
            said = (
                f"{said}, but {percent(self._limit)} are allowed. No plan that was tried "
                "stayed within that, so everything stays saved. Where training waits for the "
                f"CPU, capture a CUDA graph, or train with a larger batch{heavy}"
            )
            return Verdict(record, plan_nothing(record, self.target, said), True, said, True)
        if chosen is self.tried[-1]:
            return Verdict(record, chosen.planned, True, added=chosen.added)
        slower = percent(chosen.added.share)
        said = f"{said}: the plan that took {slower} longer stays"
        return Verdict(record, chosen.planned, True, said, added=chosen.added)


def _between_plans(share: float) -> float:
    return min(_MOST_SHARE, max(_LEAST_SHARE, share))


def _is_better(planned: PlannedStep, best: TriedPlan) -> bool:
    """Where something else makes the peak, what is kept counts."""
    peak_bytes = _peak_bytes(planned)
    if peak_bytes <= _BETTER * best.peak_bytes:
        return True
    kept_bytes = planned.plan.saved_bytes, best.planned.plan.saved_bytes
    return peak_bytes <= best.peak_bytes and kept_bytes[0] <= _KEEPS_LESS * kept_bytes[1]


def _peak_bytes(planned: PlannedStep) -> int:
    plan = planned.plan
    return plan.peak_bytes if plan.step_peak_bytes is None else plan.step_peak_bytes
