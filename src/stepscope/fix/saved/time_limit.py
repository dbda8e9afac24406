"""Whether steps that follow a plan stay within the time allowed, and what they show where not.

On a GPU a plan counts what the device does: its work hides the host's. Where training waits for the
host, following the plan takes longer than planned, and only the steps themselves show it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stepscope.fix.saved.following_costs import following_ns, with_host_costs
from stepscope.fix.saved.offload_offers import without_offload
from stepscope.fix.saved.step_watch import FOLLOWED, PLAIN

if TYPE_CHECKING:
    from collections.abc import Hashable

    from stepscope.fix.saved.save_plan import SavePlan
    from stepscope.fix.saved.step_record import StepRecord
    from stepscope.fix.saved.step_watch import StepWatch
    from stepscope.records.memory_targets import MemoryTarget

CHECKED_AFTER = 8  # passes that followed the plan
MOST_TRIES = 3  # plans
LEAST_PLAIN = 3  # passes before the recorded one: what is slower needs something to compare with
_DOUBT = 0.005  # of a step: the fastest of several differ by so much
_TOLERATED = 0.02  # of the last plan: to save nothing would be worse
_DEARER = 1.35  # by which operators take longer beside others; beyond, it is the host


@dataclass(frozen=True, slots=True)
class AddedTime:
    """Of the fastest followed step over the fastest plain one: what else the machine does makes
    steps slower, never faster."""

    plain_ns: int
    followed_ns: int

    @property
    def added_ns(self) -> int:
        return self.followed_ns - self.plain_ns

    @property
    def share(self) -> float:
        return self.added_ns / self.plain_ns


def added_time(watch: StepWatch, key: Hashable) -> AddedTime | None:
    """None before both were timed."""
    plain, followed = (watch.steps_ns(key, kind) for kind in (PLAIN, FOLLOWED))
    return AddedTime(min(plain), min(followed)) if plain and followed else None


def is_too_slow(added: AddedTime, target: MemoryTarget, *, tries: int = 1) -> bool:
    most = target.max_slowdown
    doubt = _DOUBT if tries < MOST_TRIES else _TOLERATED
    return most is not None and added.share > most + doubt


def with_measured_time(record: StepRecord, plan: SavePlan, added: AddedTime) -> StepRecord:
    """The record with the costs that explain what the plan's steps added: those of the device, or
    where they are far from enough, the host's."""
    of_host = with_host_costs(record)
    host_ns = following_ns(of_host, plan)
    host_was_counted = record.slack_ns is not None and host_ns - record.slack_ns >= plan.extra_ns
    if not host_was_counted and added.added_ns <= _DEARER * plan.extra_ns:
        return replace(record, dearer=record.dearer * added.added_ns / max(1, plan.extra_ns))
    slack_ns = host_ns - added.added_ns
    if slack_ns < 0 < host_ns:  # each costs more than those of a small chain
        of_host = with_host_costs(record, dearer=added.added_ns / host_ns)
    return without_offload(replace(of_host, slack_ns=max(0, slack_ns)))
