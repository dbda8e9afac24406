"""What a memory saver knows about passes with inputs of one kind: what was recorded, the plan, and
how its steps went."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stepscope.fix.saved.choose import plan_step
from stepscope.fix.saved.follower import FollowedPlan
from stepscope.fix.saved.later_looks import FIRST_LOOK, LaterLooks
from stepscope.fix.saved.plan_tries import PlanTries
from stepscope.fix.saved.time_limit import (
    CHECKED_AFTER,
    MOST_CHECKED,
    SETTLING,
    is_clear,
    is_surely_too_slow,
)
from stepscope.records.figures import percent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stepscope.fix.saved.choose import PlannedStep
    from stepscope.fix.saved.follower import PassReport
    from stepscope.fix.saved.pinned_plan import PinnedPlan
    from stepscope.fix.saved.plan_tries import Verdict
    from stepscope.fix.saved.recorder import StepRecorder
    from stepscope.fix.saved.step_record import StepRecord
    from stepscope.fix.saved.step_watch import BackwardPeaks
    from stepscope.fix.saved.time_limit import AddedTime
    from stepscope.records.memory_targets import MemoryTarget


_MOST_DEVIATIONS = 3  # in a row: then that plan is given up
_MOST_FAILED_PINS = 2  # then every operator is watched


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
    added: AddedTime | None = None  # by the plan that stays, when it was tried
    looks: LaterLooks | None = None  # at its later steps
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

    def unpack_recorded(self, recorder: StepRecorder, held: Any) -> Any:
        """Backward reads the recorded pass: what is allocated then says what a step needs."""
        if self.peaks is not None:
            self._read_peaks(self.peaks.reads, held.number)
        return recorder.unpack(held)

    def node_ran(self) -> None:
        if self.peaks is not None:
            self._read_peaks(self.peaks.node_ran)

    def _read_peaks(self, read: Callable[..., None], *given: int) -> None:
        try:
            read(*given)
        except Exception:  # the plan is made without them
            self.peaks = None

    def saw(self, report: PassReport, *, pinned: bool) -> Iterator[str]:
        """A pass that followed the plan; yields what there is to say about it."""
        if report.deviation is None:
            self.deviations = 0
            return
        self.pinned = None  # the next pass pins it again
        self.deviations += 1
        yield f"a pass differed from the recorded one, so its rest stays saved: {report.deviation}"
        if pinned and not self.counted:
            # Some operators save other tensors when they are watched (CTC's loss does): such a plan
            # holds in every watched pass and in no other.
            self.failed_pins += 1
            if self.failed_pins >= _MOST_FAILED_PINS:
                self.must_watch = self.counted = True
                yield "unwatched passes differ from watched ones, so all operators are watched"
        if self.deviations >= _MOST_DEVIATIONS:
            self.given_up = True
            yield (
                f"{_MOST_DEVIATIONS} passes in a row differed. From now on everything stays "
                "saved for inputs of these shapes. The model's operators change from pass to "
                "pass"
            )

    @property
    def is_due(self) -> bool:
        """Whether enough of the plan's passes were seen to ask what they took."""
        if self.decided:
            return self.looks is not None and self.looks.is_due(self.followed_passes)
        first, later = self.followed_passes == CHECKED_AFTER, self.followed_passes % CHECKED_AFTER
        return first or (self.unclear and not later)

    @property
    def settled(self) -> bool:
        """Whether the plan stays, after its first passes; one with a limit of time was looked at
        once more by then."""
        if self.given_up:
            return True
        if self.decided and self.looks is not None:
            return self.followed_passes >= FIRST_LOOK and not self.looks.suspects
        least = SETTLING if self.decided else CHECKED_AFTER
        return self.followed_passes >= least and not self.unclear

    def _is_timed(self, target: MemoryTarget) -> bool:
        """On CPUs a plan counts all its costs: it stays."""
        on_host = self.record is None or self.record.on_host
        return not on_host and self.planned is not None and target.max_slowdown is not None

    def check_time(self, added: AddedTime | None, target: MemoryTarget) -> str | None:
        """Plan again where steps are slower than allowed, with what they have shown, a few times.
        Says what was done."""
        if added is None or self.decided or not self._is_timed(target):
            return None
        assert self.record is not None
        assert self.planned is not None
        self.unclear = not is_clear(added, target) and self.followed_passes < MOST_CHECKED
        if self.unclear:
            return None
        self.tries = self.tries or PlanTries(target)
        return self._obey(self.tries.judge(self.record, self.planned, added))

    def check_later(
        self,
        added: AddedTime | None,
        target: MemoryTarget,
        has_room: Callable[[int | None], bool],
    ) -> str | None:
        """The same for a plan that was accepted; `has_room` says whether a step with such a peak
        fits into the memory that is free now."""
        if self.looks is None or self.tries is None or not self._is_timed(target):
            return None
        assert self.record is not None
        assert self.planned is not None
        too_slow = added is not None and is_surely_too_slow(added, target)
        if not self.looks.seen(self.followed_passes, too_slow=too_slow) or added is None:
            return None
        slower = f"steps now take {percent(added.share)} longer than plain ones"
        if target.limits_bytes:
            self.looks = None
            return f"{slower}. The plan stays, because a smaller one would miss the memory target"
        verdict = self.tries.judge_again(self.record, self.planned, added)
        if not has_room(verdict.planned.plan.step_peak_bytes):
            self.looks = None
            return f"{slower}. The plan stays, because a smaller one needs more memory than is free"
        return self._obey(verdict)

    def _obey(self, verdict: Verdict) -> str | None:
        self.decided, self.given_up = verdict.decided, verdict.gave_up
        self.added = verdict.added
        watched = verdict.decided and not verdict.for_good and not verdict.gave_up
        self.looks = LaterLooks() if watched else None
        if verdict.decided and not watched:
            self.tries = None
        if verdict.planned is not self.planned:
            self.pinned, self.counted, self.report, self.followed_passes = None, False, None, 0
            self.record = verdict.record
            self.use(verdict.planned)
        return verdict.said
