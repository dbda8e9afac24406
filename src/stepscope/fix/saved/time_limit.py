"""Whether steps that follow a plan stay within the time allowed.

On a GPU a plan counts what the device does: its work hides the host's. Where training waits for the
host, following the plan takes longer than planned, and only the steps themselves show it.

A training takes all of its steps, so their mean counts, not the usual one: a host that is late in
every fourth step is late. Only steps far outside the others are left out: something else ran in
them, such as an evaluation. At most means at most: a plan is accepted if the mean and its doubt are
within the limit. Steps of a plan that the device alone limits differ by a thousandth, and the
doubt is nothing; where the host is near the limit, it is a point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean, quantiles, stdev
from typing import TYPE_CHECKING

from stepscope.fix.saved.step_watch import FOLLOWED, PLAIN, STRETCH, stretches_ns

if TYPE_CHECKING:
    from collections.abc import Hashable

    from stepscope.fix.saved.step_watch import StepWatch
    from stepscope.records.memory_targets import MemoryTarget

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
