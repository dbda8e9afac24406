"""Which steps are noted in full, so that what capture does costs the training next to nothing.

Noting where each phase of a step begins and ends takes some 50 microseconds, twice that when the
training has filled the processor's caches. A step of 20 ms does not feel it; a step of 1 ms would
be 5% longer. So of short steps only some are noted. Of the others the training thread keeps one
number, the time at which they ended: all of them are counted and have a wall time.

The first steps are all noted. After that our own time, which is measured, is kept under BUDGET of
the training's. Which steps are noted depends on their number alone, without a period that a script
could have as well, so ranks of one pace note the same ones.

Nothing that happens rarely is missed. The end of an epoch, an evaluation, a checkpoint, a
compilation, a long collection of garbage, a pass or a batch that takes long are noted whenever they
come, and so is the rest of their step. After a stretch with a long step the system is asked what it
waited for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import sub
from threading import get_ident
from typing import Any

BUDGET = 0.002  # of the training's time
# So much is spent at first, whatever the budget: short runs have all their steps noted.
CREDIT_NS = 8_000_000
LONG = 1.5  # times a usual step
MOST_APART = 1024  # steps, of which at least one is noted
# What was not timed: calls of our hooks, and caches that the training finds cold.
_UNTIMED = 1.5
_TELLING_LINES = 16
_GOLDEN, _ALL = 0x9E3779B1, 1 << 32
_FIBONACCI = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2584, 4181)


def nothing() -> None:
    """Stands for a weak reference to nothing."""


class PassOver:
    """What hooks look at in each step that is not noted: few fields, because between two steps the
    training evicts them from the processor's caches."""

    __slots__ = ("anchor", "on", "quiet", "room", "thread")

    def __init__(self) -> None:
        self.on = False  # only the end of the running step is noted
        self.quiet = False  # and optimizers end steps: where passes do, one that steps is news
        self.thread = 0  # the one that trains
        self.anchor: Callable[[], Any] = nothing  # the optimizer whose steps end steps, held weakly
        self.room = 0  # steps of this stretch

    @property
    def here(self) -> bool:
        """Whether this is the training thread, in a step that is not noted."""
        return self.on and get_ident() == self.thread


class Pace:
    """Decides, in the training thread, when a stretch of steps that are not noted begins."""

    def __init__(self) -> None:
        self.passing = PassOver()
        self.first = self.began = 0  # the stretch's first step, and when it began
        self.ends: list[int] = []  # of its steps so far; the same list for all stretches
        self.limit = sys.maxsize  # a pass or a batch that takes longer is noted
        # Other optimizers that step once in a step, by their identity, and when they did in this.
        self.others: dict[int, Callable[[], Any]] = {}
        self.seen: dict[int, int] = {}
        self.fetched = 0  # batches that were not noted
        self.apart = 1  # one step of so many is noted
        self._credit = CREDIT_NS
        self._cost = 0.0  # of a noted step
        self._written = 0.0  # of it, in the writer's thread
        self._usual = 0.0

    def noted(self, wall_ns: int, own_ns: int) -> None:
        """A step was noted from its beginning to its end, which took us so long."""
        cost = own_ns * _UNTIMED + self._written
        self._cost = cost if not self._cost else self._cost + (cost - self._cost) / 8
        self._credit -= min(self._credit, int(cost))
        if not self._usual:
            self._usual = float(wall_ns)
        elif self.apart == 1:
            self._learn(wall_ns)

    def wrote(self, lines: int, own_ns: int) -> None:
        """In the writer's thread: what so many lines took it. Few of them say little."""
        if lines >= _TELLING_LINES:
            each = own_ns / lines
            self._written += (each - self._written) / (4 if self._written else 1)

    def _learn(self, wall_ns: float) -> None:
        usual = self._usual
        self._usual = usual + (min(wall_ns, 2 * usual) - usual) / 8

    def next_noted(self, number: int) -> int:
        """The first step from this one on that is noted in full."""
        self.apart = apart = self._distance()
        if apart == 1:
            return number
        below, place = _ALL // apart, (number - 1) * _GOLDEN % _ALL
        # From one such step to the next it is a Fibonacci number of steps.
        ways = _FIBONACCI if place < below else range(1, 4 * apart)
        for steps in ways:
            if (place + steps * _GOLDEN) % _ALL < below:
                return number - 1 + steps
        return number + apart

    def _distance(self) -> int:
        """A power of two, so that ranks whose costs differ still note steps in common."""
        if self._credit or not self._usual:
            return 1
        apart = 1
        while apart * BUDGET * self._usual < self._cost and apart < MOST_APART:
            apart *= 2
        return apart

    def begin(self, first: int, until: int, *, by_passes: bool) -> None:
        """Steps are not noted before the one that is `until`; backward passes may end them."""
        self.limit = int(LONG * self._usual)
        self.first = first
        self.ends.clear()
        self.seen.clear()
        self.passing.room = until - first
        self.passing.on, self.passing.quiet = True, not by_passes

    def begun(self, now: int) -> None:
        """The first of them begins."""
        self.began = now

    def end(self) -> list[int]:
        """When each step of the stretch ended."""
        self.passing.on = self.passing.quiet = False
        ends = self.ends.copy()
        if ends:
            self._learn((ends[-1] - self.began) / len(ends))
        return ends

    def longest(self, ends: list[int]) -> int:
        return max(map(sub, ends, [self.began, *ends]), default=0)

    def seen_others(self) -> list[tuple[int, Any]]:
        """Optimizers that have stepped since the anchor did, and when."""
        seen = [(at, self.others[known]()) for known, at in self.seen.items()]
        self.seen.clear()
        return [(at, other) for at, other in seen if other is not None]

    def content(self) -> dict[str, Any]:
        """For rank.json."""
        return {"one_in": self.apart, "noted_step_ns": round(self._cost)}
