"""Whether steps that follow a plan stay within the time allowed.

On a GPU a plan counts what the device does: its work hides the host's. Where training waits for the
host, following the plan takes longer than planned, and only the steps themselves show it.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from stepscope.fix.saved.step_watch import FOLLOWED, PLAIN, stretches_ns

if TYPE_CHECKING:
    from collections.abc import Hashable

    from stepscope.fix.saved.step_watch import StepWatch
    from stepscope.records.memory_targets import MemoryTarget

CHECKED_AFTER = 12  # passes that followed the plan
SETTLING = 2  # of these: one is watched to pin the plan, in one what is held is counted
LEAST_PLAIN = 5  # passes before the recorded one: what is slower needs something to compare with
_DOUBT = 0.01  # of a step: stretches of equal steps differ by so much


@dataclass(frozen=True, slots=True)
class AddedTime:
    """Of a followed step over a plain one."""

    plain_ns: int
    followed_ns: int

    @property
    def added_ns(self) -> int:
        return self.followed_ns - self.plain_ns

    @property
    def share(self) -> float:
        return self.added_ns / self.plain_ns


def added_time(watch: StepWatch, key: Hashable) -> AddedTime | None:
    """Over stretches of steps, as a training takes them: where the host is late in some steps and
    makes up for it in others, the fastest step is faster than any training. None before both
    kinds were timed."""
    plain = stretches_ns(watch.steps_ns(key, PLAIN))
    followed = stretches_ns(watch.steps_ns(key, FOLLOWED)[SETTLING:])
    return AddedTime(min(plain), round(median(followed))) if plain and followed else None


def is_too_slow(added: AddedTime, target: MemoryTarget, *, doubt: float = _DOUBT) -> bool:
    return target.max_slowdown is not None and added.share > target.max_slowdown + doubt
