"""What a memory saver knows about passes with inputs of one kind: the record, the plan, how
its steps went, and when they are checked again.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn

from stepscope.fix.saved.encodings.offload import COPY_WAITS, link_of
from stepscope.fix.saved.follower import FollowedPlan, PassReport, unpack_held
from stepscope.fix.saved.operators import disturb_caches, tensors_in
from stepscope.fix.saved.pin_plan import pin_plan
from stepscope.fix.saved.pinned_follower import PinnedFollower
from stepscope.fix.saved.pinned_plan import PinnedPlan, PinningFollower
from stepscope.fix.saved.plan_load import with_offload
from stepscope.fix.saved.planner import PlannedStep, make_plan, plan_step
from stepscope.fix.saved.recorder import StepRecorder
from stepscope.fix.saved.save_plan import KEEP, SavePlan
from stepscope.fix.saved.step_record import USUALLY_DEARER, StepRecord
from stepscope.fix.saved.step_times import (
    CHECKED_AFTER,
    MOST_CHECKED,
    SETTLING,
    AddedTime,
    BackwardPeaks,
    PlanTries,
    StepWatch,
    Verdict,
    added_time,
    is_clear,
    is_surely_too_slow,
    latest_added_time,
)
from stepscope.records.change_values import MemoryTarget
from stepscope.text.figures import percent

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


# What tells passes apart: inputs, training and autocast. Each kind has a plan of its own.


def pass_key(model: torch.nn.Module, inputs: Any) -> tuple[Any, ...]:
    kinds = ("cpu", "cuda")
    return (
        model.training,
        _shapes(inputs),
        tuple((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds),
    )


def device_of(model: torch.nn.Module) -> torch.device:
    """Of the first parameter."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _shapes(inputs: Any) -> tuple[Any, ...]:
    found = tensors_in(list(inputs) if isinstance(inputs, tuple) else inputs)
    return tuple((tuple(t.shape), t.dtype, t.device, t.requires_grad) for t in found)


def is_running(frame: Any) -> bool:
    """Whether it is one of those that called this."""
    current: Any = sys._getframe(1)
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


# When an accepted plan is looked at again.
#
# A plan is accepted after a dozen of its passes. A training goes on for hours, and its host may
# turn slower: other processes, a larger heap, a reader of data that is late. So steps are looked at
# again after 24, 48, 96, ... passes of the plan. A look costs nothing: it reads the marks that
# every pass leaves on the device's clock, of passes that are over, and waits for none.
#
# - Steps that are too slow once are looked at again twelve passes later, and count only if they
#   surely are, the doubt taken away. A plan is accepted only if they fit with the doubt on top. So
#   a
#   plan near its limit is not given up and taken again by chance.
# - Plain steps would tell what the plan adds now. But one needs the memory that the plan saves,
# which
#   something else may have taken since, and no training may run out of memory for a measurement. So
#   the plan is compared with the plain steps seen at first. If it is over its limit, a smaller one
#   is tried; where its steps are no faster, something else became slower, and the larger plan is
#   followed again, for good (step_times.py).
# - A smaller plan needs more memory: it is taken only where that is free. With a target of bytes a
#   plan stays, as the bytes were asked for: the steps' time is noted.

FIRST_LOOK = 2 * CHECKED_AFTER  # passes


@dataclass(slots=True)
class LaterLooks:
    """At the passes of one accepted plan."""

    next_at: int = FIRST_LOOK
    suspects: bool = False  # the last look found steps that are too slow

    def is_due(self, passes: int) -> bool:
        return passes >= self.next_at

    def seen(self, passes: int, *, too_slow: bool) -> bool:
        """Whether the plan has to go; else says when to look again."""
        if too_slow and self.suspects:
            return True
        self.suspects = too_slow
        self.next_at = passes + CHECKED_AFTER if too_slow else 2 * passes
        return False


# Asks what a plan's steps took, and has the plan made again where that is too long.


def check_steps(known: KnownPass, watch: StepWatch, target: MemoryTarget) -> str | None:
    """Says what was done; `known` may have another plan afterwards."""
    return _look_again(known, watch, target) if known.decided else _try(known, watch, target)


def _try(known: KnownPass, watch: StepWatch, target: MemoryTarget) -> str | None:
    added = added_time(watch, known.key)
    if added is not None:
        waited_ns = COPY_WAITS.waited_ns() // max(1, known.followed_passes - 1)
        added = replace(added, waited_ns=waited_ns)
    said = known.check_time(added, target)
    if known.decided:
        COPY_WAITS.end()
    return said


def _look_again(known: KnownPass, watch: StepWatch, target: MemoryTarget) -> str | None:
    """Waits for copies are noted from the first slow look to the second."""
    if known.added is None or known.looks is None or known.record is None:
        return None
    added = latest_added_time(watch, known.key, known.added.plain_ns)
    if added is not None and known.looks.suspects:
        added = replace(added, waited_ns=COPY_WAITS.waited_ns() // CHECKED_AFTER)
    has_room = functools.partial(watch.has_room, known.record.surroundings)
    said = known.check_later(added, target, has_room)
    if known.looks is not None and known.looks.suspects:
        COPY_WAITS.begin()
    else:
        COPY_WAITS.end()
    return said


def completed(
    record: StepRecord,
    key: Hashable,
    watch: StepWatch,
    target: MemoryTarget,
    parameters: list[torch.Tensor],
) -> StepRecord:
    """With what stood around the pass, and what the host or the link to it costs."""
    timed = target.max_slowdown is not None
    record = replace(
        with_host_costs(record) if record.on_host or timed else record,
        surroundings=watch.surroundings(parameters),
        measured_step_ns=watch.plain_ns(key),
        host_slack_ns=None if record.on_host else watch.host_slack_ns(key),
        dearer=record.dearer if record.on_host else USUALLY_DEARER,
    )
    link = link_of(watch.device)
    return record if link is None else with_offload(record, link.speed())


# What it costs the host to follow a plan: saved tensors and repeated calls pass through Python.

_LAYERS = 24
_ROUNDS = 7
_CPU = torch.device("cpu")
_NOTHING = frozenset[int]()


@dataclass(frozen=True, slots=True)
class FollowingCosts:
    """Of one saved tensor: to pack and unpack it, and as much again if it is not kept. Of one
    repeated operator: to call it, beside its own time."""

    watch_ns: int
    replace_ns: int
    repeat_ns: int


class _SmallChain(nn.Module):  # type: ignore[misc]
    """Products of four numbers, each after an activation that is worth recomputing and that
    so many products read."""

    def __init__(self, readers: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(_two_by_two() for _ in range(_LAYERS))
        self._readers = readers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            _disturb_caches()
            if x.requires_grad:
                x.register_hook(_disturb_caches)
            active = nn.functional.silu(x)
            x = torch.mm(active, weight)
            for _ in range(self._readers - 1):
                x = x + torch.mm(active, weight)
        return x


def _disturb_caches(_gradient: torch.Tensor | None = None) -> None:
    disturb_caches(_CPU)


@dataclass(frozen=True, slots=True)
class _ChainCosts:
    watch_ns: float  # of one saved tensor
    repeat_ns: float  # of one repeated operator with all who read its result


@functools.cache
def following_costs() -> FollowingCosts:
    """Measured once, on operators that do next to nothing, with the follower of every later pass;
    this thread's own time, as others may run."""
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        one, two = (_chain_costs(_SmallChain(readers)) for readers in (1, 2))
    replace_ns = max(0.0, min(one.repeat_ns, two.repeat_ns - one.repeat_ns))
    return FollowingCosts(
        round(one.watch_ns), round(replace_ns), max(0, round(one.repeat_ns - replace_ns))
    )


def with_host_costs(record: StepRecord) -> StepRecord:
    """On a GPU, whose work hides them, they tell which of two plans asks more of the host."""
    costs = following_costs()
    return replace(
        record,
        watch_ns=costs.watch_ns,
        replace_ns=costs.replace_ns,
        repeat_ns=costs.repeat_ns,
    )


def _chain_costs(model: nn.Module) -> _ChainCosts:
    record = _recorded(model)
    plan = make_plan(record, MemoryTarget())
    followed = None, _pinned(model, _keeping_all(plan)), _pinned(model, plan)
    rounds = [[_step_ns(model, pinned) for pinned in followed] for _ in range(_ROUNDS)]
    watch_ns = median(watched - plain for plain, watched, _ in rounds)
    again_ns = median(repeated - watched for _, watched, repeated in rounds)
    repeats = [record.operators[call.operator].took_ns for call in plan.repeated]
    per_repeat = again_ns / len(repeats) - median(repeats) if repeats else 0.0
    return _ChainCosts(max(0.0, watch_ns / len(record.uses)), max(0.0, per_repeat))


def _two_by_two() -> torch.Tensor:
    return torch.eye(2, dtype=torch.float32, device=_CPU)


def _recorded(model: nn.Module) -> StepRecord:
    recorder = StepRecorder(model)
    try:
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack), recorder:
            output = model(_two_by_two())
    finally:
        recorder.detach()
    return recorder.finish(output)


def _keeping_all(plan: SavePlan) -> SavePlan:
    uses = tuple(replace(use, action=KEEP, encoding=None) for use in plan.uses)
    return replace(plan, uses=uses, repeated=(), results=())


def _pinned(model: nn.Module, plan: SavePlan) -> PinnedPlan:
    seen = PinningFollower(FollowedPlan.of(plan), _NOTHING, model)
    try:
        with torch.autograd.graph.saved_tensors_hooks(seen.pack, unpack_held), seen:
            model(_two_by_two())
    finally:
        seen.detach()
    seen.finish()
    return pin_plan(seen, pausing=False)


def _step_ns(model: nn.Module, pinned: PinnedPlan | None) -> int:
    """Forward and backward; without a plan, as they are."""
    began = time.thread_time_ns()
    follower = None if pinned is None else PinnedFollower(pinned, _NOTHING, count=False)
    if follower is not None:
        follower.start()
    try:
        output = model(_two_by_two())
    finally:
        if follower is not None:
            follower.stop()
    if follower is not None:
        follower.finish()
    torch.autograd.grad(output.sum(), list(model.parameters()))
    return time.thread_time_ns() - began
