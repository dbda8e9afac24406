"""Windows that somebody asks for while the job trains, such as with the button of the live page.

The writer's thread looks for a request once per flush; the training thread does nothing for it. The
first rank that sees one writes a plan: steps so far ahead that every rank reads it in time. A plan
is created once, so all ranks of one run folder record the same steps. Nobody waits for anybody, so
no clock rounds are run: those of the run's other windows serve. A rank that sees the plan too late
records nothing and says so in rank.json.
"""

from __future__ import annotations

import json
import math
import os
import time
from typing import TYPE_CHECKING, Any

from stepscope.measure.never_raise import never_raise, note
from stepscope.measure.schedule import PlannedWindow
from stepscope.records.window_request import ID, REQUEST, SCHEMA, plan_name, step_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stepscope.measure.schedule import Schedule
    from stepscope.measure.stall_watch import Training

MOST_WINDOWS = 16  # of one run: traces are large
_FLUSHES_AHEAD, _LEAST_AHEAD_S = 2, 1.0  # until every rank has read the plan
_FASTER = 1.5  # than in the last interval, the steps to come may be
_LEAST_STEPS_AHEAD = 3
_MOST_TRIED = 200  # places for a window
_MOST_BYTES = 4096


class WindowRequests:
    """One rank's side. `look` runs in the writer's thread."""

    def __init__(
        self,
        training: Training,
        schedule: Schedule,
        run: Path,
        flush_s: float,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._training, self._schedule, self._run = training, schedule, run
        self._ahead_s = _FLUSHES_AHEAD * flush_s + _LEAST_AHEAD_S
        self._now = now
        self._before = (now(), training.number)  # at the last look
        self._stamp = self._read_stamp()  # a request that is there already was for others
        self._waiting: str | None = None
        self._planned = 0

    @property
    def step(self) -> int:
        """The running one."""
        return self._training.number

    @never_raise
    def look(self) -> None:
        """Take a new request in, plan it or follow its plan."""
        before, self._before = self._before, (self._now(), self._training.number)
        stamp = self._read_stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            self._waiting = _read(self._run / REQUEST).get("id")
        if self._waiting is None or self._is_busy():
            return
        request = str(self._waiting)
        if not ID.fullmatch(request):
            self._waiting = None
            return
        path = self._run / plan_name(request)
        if not path.exists():
            _create(path, self._plan(request, *before))
        plan = _read(path)
        if plan:
            self._waiting = None
            self._follow(plan)

    def _is_busy(self) -> bool:
        """The window before must be closed before the schedule forgets it."""
        asked = self._schedule.asked
        return asked is not None and self._training.number <= asked.last + 1

    def _read_stamp(self) -> tuple[int, int] | None:
        try:
            state = os.stat(self._run / REQUEST)  # noqa: PTH116 - every half second, for good
        except OSError:
            return None
        return state.st_mtime_ns, state.st_ino

    def _plan(self, request: str, then: float, number: int) -> dict[str, Any]:
        """Since `then` the job has gone on from step `number`: that says how fast it is."""
        plan: dict[str, Any] = {"schema": SCHEMA, "id": request}
        if self._planned >= MOST_WINDOWS:
            return {**plan, "refused": f"this run already had {MOST_WINDOWS} requested windows"}
        settings = self._training.settings
        elapsed = max(self._now() - then, 1e-3)
        rate = max(0, self._training.number - number) / elapsed
        ahead = _LEAST_STEPS_AHEAD + math.ceil(_FASTER * rate * self._ahead_s)
        first = self._first_free(self._training.number + ahead, settings.warmup + settings.active)
        if first is None:
            return {**plan, "refused": "the planned windows leave no room for another one"}
        return {**plan, "first": first, "warmup": settings.warmup, "active": settings.active}

    def _first_free(self, soonest: int, steps: int) -> int | None:
        places = range(soonest, soonest + _MOST_TRIED)
        free = self._schedule.is_free
        return next((first for first in places if free(first, first + steps - 1)), None)

    def _follow(self, plan: dict[str, Any]) -> None:
        self._planned += 1
        if plan.get("refused"):
            return
        first, warmup, active = (int(plan[name]) for name in ("first", "warmup", "active"))
        window = PlannedWindow(
            first=first,
            warmup=warmup,
            active=active,
            file=step_trace(first + warmup),
            asked=True,
        )
        if self._training.number + 1 >= first:
            note("window", f"the window requested at step {first} was seen too late")
        elif not self._schedule.is_free(window.first, window.last):
            note("window", f"the window requested at step {first} overlaps another one")
        else:
            self._schedule.asked = window
            self._training.wake(first)


def _create(path: Path, plan: dict[str, Any]) -> None:
    """Unless another rank has done it."""
    try:
        with path.open("xb", buffering=0) as file:
            file.write(json.dumps(plan).encode())
    except FileExistsError:
        return


def _read(path: Path) -> dict[str, Any]:
    """Empty for a file that is not there, or not whole yet."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
