"""Windows outside the plan: around a stall (--on-stall), and those that somebody requests
while the job trains.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.measure import folder as layout
from stepscope.measure.never_raise import never_raise, note
from stepscope.measure.profiler.schedule import PlannedWindow, Schedule
from stepscope.measure.steps.step_times import steps_of_stretch
from stepscope.records.folders import (
    OTHER,
    PHASE_FIELDS,
    REQUEST_FILE,
    REQUEST_ID,
    REQUEST_SCHEMA,
    STEP,
    WALL,
    WALLS,
    plan_name,
    step_trace,
)

if TYPE_CHECKING:
    from stepscope.measure.processes import RunningSession
    from stepscope.measure.writer import AsLines

    Line = dict[str, Any]

# `--on-stall`: open the profiler around a stall, so that a trace shows one.
#
# The writer's thread looks at every line that it writes. A step longer than 1.5 times the median of
# recent ones is a stall; its class is the phase with most of the extra time. When a class has been
# seen twice, a window is asked for: where the distance between its stalls says that the next one
# comes, or, if they do not come regularly, a longer one at once. After a few windows without a
# stall it gives up.
#
# Only this rank opens the window: stalls differ between ranks, and none can tell the others in
# time. So no clock rounds are run for it, and its trace lies in a file of its own.

STALL_TRACE = layout.TRACE.replace(".", "-stall.", 1)
TIMES = 1.5  # the median step
LEAST_NS = 1_000_000  # of extra time
TRIES = 4  # windows
_REQUESTS = 50  # of windows that may not open: the script's own profiler runs
_RECENT = 101  # steps that make the median
_ENOUGH = 20
_AGAIN = 25  # steps after which the median is computed anew
_KEPT = 8  # stalls of a class
_LARGE = 0.5  # of the class's largest one
_BEFORE, _AFTER = 1, 1  # recorded steps around the expected one
_LONG = 20  # recorded steps where no stall can be expected
_SLACK = 0.1  # of the distance between regular stalls
_FAR = 10  # nearer ones must keep their distance exactly
_PHASES = (*PHASE_FIELDS, OTHER)


class StalledStep(NamedTuple):
    """A step and its extra time."""

    step: int
    extra_ns: float


class StallDetector:
    """Finds stalls among steps as they come, and sorts them by phase."""

    def __init__(self) -> None:
        self._recent: deque[Line] = deque(maxlen=_RECENT)
        self._medians: dict[str, float] = {}
        self._seen = 0

    def see(self, line: Line) -> tuple[str, StalledStep] | None:
        """The stall and the phase that made it; None for a usual step."""
        extra = self.extra_ns(line)
        stall = (self._longest(line), StalledStep(line[STEP], extra)) if extra else None
        self._recent.append(line)
        self._seen += 1
        if len(self._recent) >= _ENOUGH and (not self._medians or self._seen % _AGAIN == 0):
            self._medians = {
                name: median([recent.get(name, 0) for recent in self._recent])
                for name in (WALL, *_PHASES)
            }
        return stall

    def extra_ns(self, line: Line, usual: float = 0) -> float:
        """Zero for a usual step; `usual` may say that steps are longer here."""
        if not self._medians:
            return 0.0
        usual = max(usual, self._medians[WALL])
        extra: float = line[WALL] - usual
        return extra if extra > max((TIMES - 1) * usual, LEAST_NS) else 0.0

    def _longest(self, line: Line) -> str:
        return max(_PHASES, key=lambda name: line.get(name, 0) - self._medians[name])


class StallWatch:
    """Turns notes into lines like the function that it wraps, and watches them."""

    def __init__(
        self, as_lines: AsLines, training: RunningSession, schedule: Schedule, folder: Path
    ) -> None:
        self._as_lines, self._training = as_lines, training
        self._schedule, self._folder = schedule, folder
        self._detector = StallDetector()
        self._stalls: dict[str, deque[StalledStep]] = {}
        self._asked: PlannedWindow | None = None
        self._recorded: list[Line] = []  # active steps of the window that was asked for
        self._expected_ns = 0.0  # of extra time
        self._tries = self._requests = 0
        self._hit: dict[str, Any] | None = None

    def __call__(self, rows: list[Any], *, last: bool) -> list[str]:
        lines = self._as_lines(rows, last=last)
        try:
            self._look(list(map(json.loads, lines)))
        except Exception as error:
            note("stall watch", error)
        return lines

    def content(self) -> dict[str, Any]:
        """For rank.json."""
        return {"windows": self._tries, "stall": self._hit}

    @property
    def gave_up(self) -> bool:
        return self._hit is None and (self._tries >= TRIES or self._requests >= _REQUESTS)

    def _look(self, lines: list[Line]) -> None:
        for line in lines:
            for step in steps_of_stretch(line) if WALLS in line else (line,):
                self._see(step)
        if self._hit is not None or self._asked is not None:
            return
        if self.gave_up:
            layout.remove(self._folder / STALL_TRACE)  # it shows none
        else:
            self._expect()

    def _see(self, line: Line) -> None:
        asked, step = self._asked, line[STEP]
        if asked is not None and step >= asked.first_active:
            if step <= asked.last and line.get("window"):
                self._recorded.append(line)
            if step >= asked.last:
                self._judge()
        if any(line.get(mark) for mark in ("window", "memory", "host", "first", "last")):
            return
        stall = self._detector.see(line)
        if stall is not None:
            self._stalls.setdefault(stall[0], deque(maxlen=_KEPT)).append(stall[1])

    def _judge(self) -> None:
        """The window is over: did it record a stall?"""
        recorded, self._recorded, self._asked = self._recorded, [], None
        if not recorded:
            return
        self._tries += 1
        usual = median([line[WALL] for line in recorded])  # the profiler makes steps longer
        longest = max(recorded, key=lambda line: int(line[WALL]))
        if self._detector.extra_ns(longest, usual) > _LARGE * self._expected_ns:
            self._hit = {"step": longest[STEP], "wall_ns": longest[WALL]}

    def _expect(self) -> None:
        """Ask for a window, if a class of stalls has been seen twice."""
        classes = [_large(list(stalls)) for stalls in self._stalls.values()]
        seen_twice = [stalls for stalls in classes if len(stalls) >= 2]
        if not seen_twice:
            return
        stalls = max(seen_twice, key=lambda stalls: sum(stall.extra_ns for stall in stalls))
        steps = [stall.step for stall in stalls]
        apart = _distance(steps) if self._tries < TRIES - 1 else None
        window = self._at_once() if apart is None else self._before_next(steps[-1], apart)
        if window is not None:
            self._requests += 1
            self._asked = self._schedule.extra = window
            self._expected_ns = median([stall.extra_ns for stall in stalls])
            self._training.wake(window.first)

    def _before_next(self, last: int, apart: int) -> PlannedWindow | None:
        """Around the first stall to come that can still be reached and where nothing else is."""
        active = max(_BEFORE + 1 + _AFTER, min(apart + 1, _LONG) if apart < _LONG // 2 else 0)
        soonest = self._training.number + 2
        lead = _BEFORE + self._training.settings.warmup
        coming = max(1, -(-(soonest + lead - last) // apart))
        for number in range(coming, coming + 10):
            window = self._window(last + number * apart - lead, active)
            if window is not None:
                return window
        return None

    def _at_once(self) -> PlannedWindow | None:
        return self._window(self._training.number + 2, _LONG)

    def _window(self, first: int, active: int) -> PlannedWindow | None:
        warmup = self._training.settings.warmup
        window = PlannedWindow(
            first=first, warmup=warmup, active=active, file=STALL_TRACE, kind="stall"
        )
        return window if self._schedule.is_free(window.first, window.last) else None


def _large(stalls: list[StalledStep]) -> list[StalledStep]:
    """Without the small ones: on a busy machine some steps are a little longer by chance."""
    largest = max((stall.extra_ns for stall in stalls), default=0.0)
    return [stall for stall in stalls if stall.extra_ns > _LARGE * largest]


def _distance(steps: list[int]) -> int | None:
    """Steps between two stalls; None if they do not come regularly."""
    apart = [later - earlier for earlier, later in pairwise(steps)]
    usual = round(median(apart))
    slack = max(1.0, _SLACK * usual) if usual >= _FAR else 0.0
    # Windows and other causes may hide one: twice or three times the distance is regular, too.
    multiples = [distance - usual * max(1, round(distance / usual)) for distance in apart]
    return usual if all(abs(far) <= slack for far in multiples) else None


# Windows that somebody asks for while the job trains, such as with the button of the live page.
#
# The writer's thread looks for a request once per flush; the training thread does nothing for it.
# The first rank that sees one writes a plan: steps so far ahead that every rank reads it in time. A
# plan is created once, so all ranks of one run folder record the same steps. Nobody waits for
# anybody, so no clock rounds are run: those of the run's other windows serve. A rank that sees the
# plan too late records nothing and says so in rank.json.

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
        training: RunningSession,
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
            self._waiting = _read(self._run / REQUEST_FILE).get("id")
        if self._waiting is None or self._is_busy():
            return
        request = str(self._waiting)
        if not REQUEST_ID.fullmatch(request):
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
            state = os.stat(self._run / REQUEST_FILE)  # noqa: PTH116 - every half second, for good
        except OSError:
            return None
        return state.st_mtime_ns, state.st_ino

    def _plan(self, request: str, then: float, number: int) -> dict[str, Any]:
        """Since `then` the job has gone on from step `number`: that says how fast it is."""
        plan: dict[str, Any] = {"schema": REQUEST_SCHEMA, "id": request}
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
            first=first, warmup=warmup, active=active, file=step_trace(first + warmup), kind="asked"
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
