"""Time whole steps with and without the plan, and choose the plan to try next so that they
stay within the time allowed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import mean, median, quantiles, stdev
from typing import Any

import torch

from stepscope.fix.saved.operators import is_capturing
from stepscope.fix.saved.plan_load import NO_LOAD, PlanLoad
from stepscope.fix.saved.planner import PlannedStep, plan_nothing, plan_step
from stepscope.fix.saved.step_record import NodePeak, StepRecord, StepSurroundings
from stepscope.records.change_values import MemoryTarget
from stepscope.text.figures import duration, percent

# Which plan to try after the steps of one were timed.
#
# Whether the device, the host or both made steps longer is not known. What is: a plan that asks
# less of each of them takes less time. So the next plan lies between the best one that fitted and
# the least one that did not, by what they ask of both. Nothing that was tried is forgotten: the
# plan that fits and saves most stays.
#
# The steps of an accepted plan may become slower later, and plain ones to compare with are no
# longer seen. Then a smaller plan tells: if its steps are no faster, the plan was not the reason,
# and the larger one is followed again.

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
        return best.added.most_share >= _ENOUGH * self._limit or (
            best.planned.meets_target and self.target.limits_bytes
        )

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
        # If what lies between them takes a time between.
        low = 0.0 if best is None else best.added.most_share
        share = _between_plans((_AIM * self._limit - low) / max(1e-9, slow.added.most_share - low))
        if best is not None and best is self.tried[-1]:
            share = (share + self._proportional_share(best, slow)) / 2
        return share

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


# Whether steps that follow a plan stay within the time allowed.
#
# On a GPU a plan counts what the device does: its work hides the host's. Where training waits for
# the host, following the plan takes longer than planned, and only the steps themselves show it.
#
# A training takes all of its steps, so their mean counts, not the usual one: a host that is late in
# every fourth step is late. Only steps far outside the others are left out: something else ran in
# them, such as an evaluation. At most means at most: a plan is accepted if the mean and its doubt
# are within the limit. Steps of a plan that the device alone limits differ by a thousandth, and the
# doubt is nothing; where the host is near the limit, it is a point.

CHECKED_AFTER = 12  # passes that followed the plan
MOST_CHECKED = 3 * CHECKED_AFTER  # where the time allowed lies among those that steps took
SETTLING = 2  # of these: one is watched to pin the plan, in one what is held is counted
LEAST_PLAIN = 8  # passes before the recorded one: one disturbed step is in three stretches of it
_STANDARD_ERRORS = 2  # the mean lies within them in 19 of 20 cases
_FENCE = 1.5  # Tukey's: quartile ranges beyond the upper quartile
_LEAST_FENCED = 4  # steps


@dataclass(frozen=True, slots=True)
class AddedTime:
    """Of a followed step over a plain one."""

    plain_ns: int
    followed_ns: int  # the mean
    doubt_ns: int = 0  # by which the mean may be off
    waited_ns: int = 0  # by the device, a step, for values that were offloaded

    @property
    def added_ns(self) -> int:
        return self.followed_ns - self.plain_ns

    @property
    def share(self) -> float:
        return self.added_ns / self.plain_ns

    @property
    def doubt(self) -> float:
        """Of a plain step."""
        return self.doubt_ns / self.plain_ns

    @property
    def most_share(self) -> float:
        """With the doubt: this is to be within the limit."""
        return self.share + self.doubt


def added_time(watch: StepWatch, key: Hashable) -> AddedTime | None:
    """Since the plan is followed. None before both kinds of steps were timed."""
    plain = stretches_ns(watch.steps_ns(key, PLAIN))
    followed = watch.steps_ns(key, FOLLOWED)[SETTLING:]
    return added_by(followed, min(plain)) if plain and followed else None


def latest_added_time(watch: StepWatch, key: Hashable, plain_ns: int) -> AddedTime | None:
    """Of the latest steps; None where the device is not done with enough of them."""
    followed = watch.latest_steps_ns(key, FOLLOWED, CHECKED_AFTER)
    return added_by(followed, plain_ns) if len(followed) >= CHECKED_AFTER // 2 else None


def added_by(steps: list[int], plain_ns: int) -> AddedTime:
    steps = _undisturbed(steps)
    stretches = stretches_ns(steps)
    doubt_ns = 0.0
    if len(stretches) > 1:
        # Of stretches, as a late step is often followed by an early one.
        independent = max(1.0, len(steps) / STRETCH)
        doubt_ns = _STANDARD_ERRORS * stdev(stretches) / math.sqrt(independent)
    return AddedTime(plain_ns, round(mean(steps)), round(doubt_ns))


def _undisturbed(steps: list[int]) -> list[int]:
    if len(steps) < _LEAST_FENCED:
        return steps
    low, _, high = quantiles(steps, n=4, method="inclusive")
    return [one for one in steps if one <= high + _FENCE * (high - low)]


def is_clear(added: AddedTime, target: MemoryTarget) -> bool:
    """Whether the time allowed lies outside the doubt: else more steps have to tell."""
    limit = target.max_slowdown
    return limit is None or abs(added.share - limit) >= added.doubt


def is_too_slow(added: AddedTime, target: MemoryTarget) -> bool:
    return target.max_slowdown is not None and added.most_share > target.max_slowdown


def is_surely_too_slow(added: AddedTime, target: MemoryTarget) -> bool:
    """A plan that was accepted stays until this: it is not given up and taken again by chance."""
    return target.max_slowdown is not None and added.share - added.doubt > target.max_slowdown


# How long whole steps take, and what the allocator holds in them; nothing is changed for it.

_MOST_PASSES = 512  # plain ones must not be forgotten before the last plan is tried
STRETCH = 3  # steps
_FASTER = 0.9  # of a step: what the host needs where it is clearly ahead of the device
PLAIN, RECORDED, FOLLOWED, OUTDATED = "plain", "recorded", "followed", "outdated"


@dataclass(slots=True)
class _Begun:
    """One pass: which kind of inputs, what was done with it, and when it began."""

    key: Hashable
    kind: str
    mark: Any  # a CUDA event, or nanoseconds; None in the capture of a CUDA graph
    host_ns: int = 0  # when the host began it


class StepWatch:
    """From the beginning of one pass to that of the next."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.begun_bytes: int | None = None
        self._passes: list[_Begun] = []
        self._first = True

    def begins(self, key: Hashable, device: torch.device) -> None:
        self.device = device
        self.begun_bytes = allocated_bytes(self.device)
        if self._first:  # kernels are loaded in it
            self._first = False
            return
        self._passes.append(_Begun(key, PLAIN, _mark(self.device), time.perf_counter_ns()))
        del self._passes[:-_MOST_PASSES]

    def is_of(self, kind: str) -> None:
        """What is done with the pass that has begun."""
        if self._passes:
            self._passes[-1].kind = kind

    def forget_followed(self) -> None:
        """Later passes follow another plan."""
        for one in self._passes:
            if one.kind == FOLLOWED:
                one.kind = OUTDATED

    def steps_ns(self, key: Hashable, kind: str) -> list[int]:
        """Of all passes of a kind that another has followed."""
        marks = [one.mark for one in self._passes if one.mark is not None]
        if self.device.type == "cuda" and marks:
            marks[-1].synchronize()
        pairs = zip(self._passes, self._passes[1:], strict=False)
        return [
            _between_ns(one.mark, following.mark)
            for one, following in pairs
            if one.key == key and one.kind == kind and _have_marks(one, following)
        ]

    def latest_steps_ns(self, key: Hashable, kind: str, count: int) -> list[int]:
        """Of the last `count` of a kind that the device is done with: nobody waits."""
        steps: list[int] = []
        for following, one in pairwise(reversed(self._passes)):
            if len(steps) == count:
                break
            of_kind = one.key == key and one.kind == kind
            if of_kind and _have_marks(one, following) and _is_over(following.mark):
                steps.append(_between_ns(one.mark, following.mark))
        return steps[::-1]

    def plain_ns(self, key: Hashable) -> int | None:
        """Of a step before there was a plan. On a GPU in the fastest stretch: first steps also load
        kernels and find memory."""
        steps = self.steps_ns(key, PLAIN)
        if not steps:
            return None
        return min(stretches_ns(steps)) if self.device.type == "cuda" else round(median(steps))

    def host_slack_ns(self, key: Hashable) -> int | None:
        """By which the host is faster than the device. It runs ahead until its queue is full: its
        fastest step tells. None where it is hardly faster: it may be what the device waits for,
        or wait for the device in every step."""
        plain_ns = self.plain_ns(key)
        steps = [
            following.host_ns - one.host_ns
            for one, following in zip(self._passes, self._passes[1:], strict=False)
            if one.key == key and one.kind == PLAIN
        ]
        if plain_ns is None or not steps or min(steps) > _FASTER * plain_ns:
            return None
        return plain_ns - min(steps)

    def typical_ns(self, key: Hashable, kind: str) -> int | None:
        steps = self.steps_ns(key, kind)
        return round(median(steps)) if steps else None

    def has_room(self, recorded: StepSurroundings | None, peak_bytes: int | None) -> bool:
        """Whether a step fits that needs so much beside what was allocated when a pass was
        recorded; more may be by now."""
        limit = _limit_bytes(self.device)
        if recorded is None or peak_bytes is None or limit is None or self.begun_bytes is None:
            return True
        return peak_bytes + self.begun_bytes - recorded.begun_bytes <= recorded.usable_bytes(limit)

    def surroundings(self, parameters: list[torch.Tensor]) -> StepSurroundings | None:
        """At the end of the pass that began last."""
        ended = allocated_bytes(self.device)
        if self.begun_bytes is None or ended is None:
            return None
        missing = [p for p in parameters if p.requires_grad and p.grad is None]
        return StepSurroundings(
            begun_bytes=self.begun_bytes,
            ended_bytes=ended,
            gradient_bytes=sum(p.nbytes for p in missing),
            limit_bytes=_limit_bytes(self.device),
            expandable=any(one.get("is_expandable") for one in torch.cuda.memory_snapshot()),
        )


class BackwardPeaks:
    """The most that was allocated while each node of one backward pass ran, before the first of
    them, and after the last. Torch's own figure of the peak starts anew with every node."""

    def __init__(self, device: torch.device) -> None:
        self.readings: list[NodePeak] = []
        self._device = device
        self._read: int | None = None
        self._node_bytes: int | None = None  # the most until the node had run
        self._ran_bytes = 0  # and what was there then
        self._open = device.type == "cuda"
        if self._open:
            self._start()

    def reads(self, use: int) -> None:
        if self._open:
            self._note()
            self._read = use

    def node_ran(self) -> None:
        """What it read goes now, before anything else is allocated."""
        if self._open and self._node_bytes is None:
            self._node_bytes = int(torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
            self._ran_bytes = allocated_bytes(self._device) or 0

    def end(self) -> None:
        """Another pass begins."""
        if self._open:
            self._note()
            self._open = False

    def _start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._begun_bytes = allocated_bytes(self._device)

    def _note(self) -> None:
        latest_bytes = int(torch.cuda.max_memory_allocated(self._device))
        peak_bytes = latest_bytes if self._node_bytes is None else self._node_bytes
        # What is there before the node's tensors go says nothing about the time after.
        was_more = self._node_bytes is not None and latest_bytes > self._ran_bytes
        after_bytes = latest_bytes if was_more else None
        reading = NodePeak(self._read, peak_bytes, self._begun_bytes, after_bytes)
        self.readings.append(reading)
        self._node_bytes = None
        self._start()


def stretches_ns(steps: list[int]) -> list[int]:
    """A step's time over every few steps in a row; single ones where there are not enough."""
    if len(steps) < STRETCH:
        return steps
    rows = zip(*(steps[first:] for first in range(STRETCH)), strict=False)
    return [round(mean(row)) for row in rows]


def allocated_bytes(device: torch.device) -> int | None:
    """None where torch keeps no account. As `torch.cuda.memory_allocated`, which sorts all figures
    first: 19 instead of 118 microseconds (H200)."""
    if device.type != "cuda":
        return None
    account = torch.cuda.memory_stats_as_nested_dict(device)
    return int(account["allocated_bytes"]["all"]["current"]) if account else 0


def _limit_bytes(device: torch.device) -> int | None:
    """What this process may allocate: its share of the device, and what others left of it."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: 1.0)(device)
    return min(int(share * total), int(free) + int(torch.cuda.memory_reserved(device)))


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter_ns()
    if is_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _have_marks(*passes: _Begun) -> bool:
    return all(one.mark is not None for one in passes)


def _is_over(mark: Any) -> bool:
    return isinstance(mark, int) or bool(mark.query())


def _between_ns(one: Any, following: Any) -> int:
    if isinstance(one, int):
        return int(following) - one
    return round(float(one.elapsed_time(following)) * 1e6)
