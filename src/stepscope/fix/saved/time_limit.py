"""Whether steps that follow a plan stay within the time that was allowed.

On a GPU a plan counts what the device does: its work hides the host's. Where training waits for the
host, following the plan takes longer than planned, and only the steps themselves show it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.fix.saved.step_watch import FOLLOWED, PLAIN

if TYPE_CHECKING:
    from collections.abc import Hashable

    from stepscope.fix.saved.step_watch import StepWatch
    from stepscope.records.memory_targets import MemoryTarget

CHECKED_AFTER = 8  # passes that followed the plan
LEAST_PLAIN = 3  # passes before the recorded one: what is slower needs something to compare with
_DOUBT = 0.02  # steps differ


def measured_slowdown(watch: StepWatch, key: Hashable) -> float | None:
    """Of the fastest followed step over the fastest plain one: what else the machine does makes
    steps slower, never faster. None before both were timed."""
    plain, followed = (watch.steps_ns(key, kind) for kind in (PLAIN, FOLLOWED))
    return min(followed) / min(plain) - 1 if plain and followed else None


def is_too_slow(slowdown: float | None, target: MemoryTarget) -> bool:
    most = target.max_slowdown
    return slowdown is not None and most is not None and slowdown > most + _DOUBT
