"""Whether steps that follow a plan stay within the time allowed.

On a GPU a plan counts what the device does: its work hides the host's. Where training waits for the
host, following the plan takes longer than planned, and only the steps themselves show it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import TYPE_CHECKING

from stepscope.fix.saved.step_watch import FOLLOWED, PLAIN, stretches_ns

if TYPE_CHECKING:
    from collections.abc import Hashable

    from stepscope.fix.saved.step_watch import StepWatch
    from stepscope.records.memory_targets import MemoryTarget

CHECKED_AFTER = 12  # passes that followed the plan
MOST_CHECKED = 3 * CHECKED_AFTER  # where the time allowed lies among those that steps took
SETTLING = 2  # of these: one is watched to pin the plan, in one what is held is counted
LEAST_PLAIN = 8  # passes before the recorded one: one disturbed step is in three stretches of it
_DOUBT = 0.005  # of a step: stretches of equal steps differ by so much


@dataclass(frozen=True, slots=True)
class AddedTime:
    """Of a followed step over a plain one."""

    plain_ns: int
    followed_ns: int  # the median
    low_ns: int | None = None  # a quarter of the stretches took less
    high_ns: int | None = None  # and a quarter more
    waited_ns: int = 0  # by the device, a step, for values that were offloaded

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
    if not plain or not followed:
        return None
    low_ns, high_ns = quartiles(followed) if len(followed) > 1 else (followed[0], followed[0])
    return AddedTime(min(plain), round(median(followed)), low_ns, high_ns)


def quartiles(times: list[int]) -> tuple[int, int]:
    low, _, high = quantiles(times, n=4, method="inclusive")
    return round(low), round(high)


def is_clear(added: AddedTime, target: MemoryTarget) -> bool:
    """Whether most steps lie on one side of the time allowed: else more of them have to tell."""
    times = added.low_ns, added.high_ns
    sides = {
        is_too_slow(replace(added, followed_ns=one), target) for one in times if one is not None
    }
    return len(sides) <= 1


def is_too_slow(added: AddedTime, target: MemoryTarget, *, doubt: float = _DOUBT) -> bool:
    return target.max_slowdown is not None and added.share > target.max_slowdown + doubt
