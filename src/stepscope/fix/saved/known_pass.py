"""What a memory saver knows about passes with inputs of one kind: what was recorded, the plan, and
how its steps went."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stepscope.fix.saved.choose import plan_step
from stepscope.fix.saved.follower import FollowedPlan
from stepscope.fix.saved.plan_tries import PlanTries
from stepscope.fix.saved.time_limit import CHECKED_AFTER, MOST_CHECKED, SETTLING, is_clear

if TYPE_CHECKING:
    from stepscope.fix.saved.choose import PlannedStep
    from stepscope.fix.saved.follower import PassReport
    from stepscope.fix.saved.pinned_plan import PinnedPlan
    from stepscope.fix.saved.step_record import StepRecord
    from stepscope.fix.saved.step_watch import BackwardPeaks
    from stepscope.fix.saved.time_limit import AddedTime
    from stepscope.records.memory_targets import MemoryTarget


@dataclass(slots=True)
class KnownPass:
    """A plan is made when it is first asked for: by then the recorded step's backward has run, and
    the allocator has told what it needed."""

    key: Any = None
    seen: int = 0
    record: StepRecord | None = None
    planned: PlannedStep | None = None
    peaks: BackwardPeaks | None = None  # of the recorded pass's backward
    followed: FollowedPlan | None = None
    pinned: PinnedPlan | None = None
    must_watch: bool = False  # the plan cannot be pinned: every operator passes through Python
    report: PassReport | None = None
    counted: bool = False  # the report is of an ordinary pass
    deviations: int = 0  # in a row
    failed_pins: int = 0  # pinned passes that differed, before any that did not
    followed_passes: int = 0
    tries: PlanTries | None = None  # plans whose steps were timed
    decided: bool = False  # the plan stays
    unclear: bool = False  # whether it is too slow: more of its steps have to tell
    given_up: bool = False

    def make_plan(self, target: MemoryTarget) -> None:
        """Once more if the allocator has told more since; a plan that is carried out stays."""
        if self.record is None or self.followed_passes:
            return
        readings = tuple(self.peaks.readings) if self.peaks is not None else ()
        if self.planned is None or len(readings) > len(self.record.backward_peaks):
            self.record = replace(self.record, backward_peaks=readings)
            self.use(plan_step(self.record, target))

    def use(self, planned: PlannedStep) -> None:
        self.planned, self.followed = planned, FollowedPlan.of(planned.plan)

    @property
    def is_due(self) -> bool:
        """Whether enough of the plan's passes were seen to ask what they took."""
        first, later = self.followed_passes == CHECKED_AFTER, self.followed_passes % CHECKED_AFTER
        return first or (self.unclear and not later)

    @property
    def settled(self) -> bool:
        """Whether the plan stays, after its first passes."""
        least = SETTLING if self.decided else CHECKED_AFTER
        return self.given_up or (self.followed_passes >= least and not self.unclear)

    def check_time(self, added: AddedTime | None, target: MemoryTarget) -> str | None:
        """Plan again where steps are slower than allowed, with what they have shown, a few times.
        Says what was done. On CPUs a plan counts all its costs: it stays."""
        if self.record is None or self.record.on_host or self.planned is None or self.decided:
            return None
        if added is None or target.max_slowdown is None:
            return None
        self.unclear = not is_clear(added, target) and self.followed_passes < MOST_CHECKED
        if self.unclear:
            return None
        self.tries = self.tries or PlanTries(target)
        verdict = self.tries.judge(self.record, self.planned, added)
        self.decided, self.given_up = verdict.decided, verdict.gave_up
        if self.decided:
            self.tries = None
        if verdict.planned is not self.planned:
            self.pinned, self.counted, self.report, self.followed_passes = None, False, None, 0
            self.record = verdict.record
            self.use(verdict.planned)
        return verdict.said
