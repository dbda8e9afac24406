"""Python stacks of the training thread outside the window: where host time goes, at almost no cost.

A daemon thread samples one thread's stack several times a second. It counts its own processor time
and the disturbance of each wake-up, and slows down to stay under BUDGET of the time. Samples fall
on round times of the wall clock: a job waits for whichever rank is disturbed, so ranks that are
disturbed together lose that time once, not one after the other. After the windows it may spend
CREDIT_S at its full rate, once: a run of a few seconds would otherwise have too few samples.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import Counter
from collections.abc import Callable
from time import perf_counter, thread_time, time  # a script may replace those of the module
from types import CodeType
from typing import Any

from stepscope.measure.never_raise import note
from stepscope.measure.writer import started_thread

BUDGET = 0.001
# When no core is free, a sample also costs the training two switches and some of its caches.
DISTURBANCE_S = 30e-6
CREDIT_S = 0.03
DEEPEST, OUTERMOST = 96, 32  # frames that are kept; of a deeper stack the user's are the outermost
_DEEPEST_WALK = 1000
MOST_STACKS = 5000
MOST_SAMPLES = 200_000  # that keep the number of their step
FIRST_SAVE_S, MOST_SAVE_S = 30.0, 1800.0  # ever more rarely

# Libraries of environments: a script that has loaded one does reinforcement learning.
ENVIRONMENTS = ("gym", "gymnasium", "pettingzoo", "envpool", "dm_control", "procgen", "brax")
# For every frame, innermost first: the identity of its code and the instruction. Files, lines and
# names are looked up once, at the end: hashing a code object hashes everything in it.
Stack = tuple[int, ...]
Frame = tuple[str, int, str]  # file, line, function


class SampledSteps:
    """The step and the stack of each sample. When there are too many, every second one goes, so
    that those left are spread evenly over the run."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._stacks = array("q")
        self._seen = 0
        self._every = 1

    def add(self, step: int, stack: int) -> None:
        self._seen += 1
        if self._seen % self._every:
            return
        self._steps.append(step)
        self._stacks.append(stack)
        if len(self._steps) >= MOST_SAMPLES:
            self._every *= 2
            self._steps, self._stacks = self._steps[1::2], self._stacks[1::2]

    def content(self, places: list[int]) -> dict[str, Any]:
        """`places` says where each stack is in the list of stacks."""
        return {
            "every": self._every,
            "number": self._steps.tolist(),
            "stack": [places[stack] for stack in self._stacks],
        }


class Sampler:
    """Counts stacks until stopped; paused while the profiler runs."""

    def __init__(
        self, thread: int, hz: float, step: Callable[[], int] = lambda: 0, *, closely_from: int = 0
    ) -> None:
        """`step` says which step runs now; from step `closely_from` on the credit is spent."""
        self._thread_id = thread
        self._interval = 1.0 / hz
        self._step = step
        self._closely_from = closely_from
        self._credit_s = CREDIT_S
        self._numbers: dict[Stack, int] = {}
        self._counts: list[int] = []  # by the stack's number
        self._sampled_steps = SampledSteps()
        self._codes: dict[int, CodeType] = {}  # kept alive, so that identities stay unique
        self._awake = threading.Event()
        self._awake.set()
        self._stop = threading.Lock()  # held until the end: waiting for it costs less than an Event
        self._stop.acquire()
        self.samples = 0
        self.missed = 0
        self._cost_s = 0.0
        self._watched_s = 0.0
        self.save: Callable[[dict[str, Any]], object] = dict  # called now and then
        self._thread = started_thread(self._run, "stepscope-sampler")

    def pause(self) -> None:
        self._awake.clear()

    def resume(self) -> None:
        self._awake.set()

    def close(self) -> dict[str, Any]:
        """Stop; everything for JSON."""
        self._stop.release()
        self._awake.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
        return self._content()

    def _content(self) -> dict[str, Any]:
        """The commonest stack first."""
        frames = [self._frames(stack) for stack in list(self._numbers)]
        stacks: Counter[tuple[Frame, ...]] = Counter()
        for stack, count in zip(frames, self._counts, strict=True):
            stacks[stack] += count
        ordered = stacks.most_common()
        places = {stack: place for place, (stack, _) in enumerate(ordered)}
        return {
            "schema": 1,
            "samples": self.samples,
            "not_kept": self.missed,
            "watched_s": self._watched_s,
            "environments": [name for name in ENVIRONMENTS if name in sys.modules],
            "cost_s": self._cost_s,
            "stacks": [
                {"count": count, "frames": [list(frame) for frame in stack]}
                for stack, count in ordered
            ],
            "steps": self._sampled_steps.content([places[stack] for stack in frames]),
        }

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            note("sampler", error)

    def _watch(self) -> None:
        interval = self._interval
        usual = 0.0
        began, spent = perf_counter(), thread_time()
        save_at, until_next = began + FIRST_SAVE_S, FIRST_SAVE_S
        while not self._stop.acquire(timeout=interval - time() % interval):
            watching = self._awake.is_set()
            if watching:
                self._sample()
            else:
                self._awake.wait()
            now, used = perf_counter(), thread_time()
            if watching:
                cost = used - spent
                self._cost_s += cost
                self._watched_s += now - began
                usual = cost if not usual else usual + (cost - usual) / 8
                interval = self._next_interval(cost, usual)
            if now >= save_at:  # a job that is killed keeps these
                self.save(self._content())
                until_next = min(2 * until_next, MOST_SAVE_S)
                now, used = perf_counter(), thread_time()
                save_at = now + until_next
            began, spent = now, used

    def _next_interval(self, cost_s: float, usual_s: float) -> float:
        """Full rate while the credit lasts, else what the budget allows."""
        if self._credit_s > 0 and self._step() >= self._closely_from:
            self._credit_s -= cost_s + DISTURBANCE_S
            return self._interval
        # Doubled until samples of this cost fit, so that ranks agree on one interval.
        interval = self._interval
        while interval * BUDGET < usual_s + DISTURBANCE_S and interval < 1.0:
            interval *= 2
        return interval

    def _sample(self) -> None:
        frame = sys._current_frames().get(self._thread_id)
        codes = self._codes
        places: list[int] = []
        while frame is not None and len(places) < 2 * _DEEPEST_WALK:
            code = frame.f_code
            place = id(code)
            codes[place] = code
            places += (place, frame.f_lasti)
            frame = frame.f_back
        if not places:
            return
        if len(places) > 2 * DEEPEST:
            places = places[: 2 * (DEEPEST - OUTERMOST)] + places[-2 * OUTERMOST :]
        self.samples += 1
        number = self._number(tuple(places))
        if number is None:
            self.missed += 1
        else:
            self._counts[number] += 1
            self._sampled_steps.add(self._step(), number)

    def _number(self, stack: Stack) -> int | None:
        """None for a new stack when there are too many."""
        number = self._numbers.get(stack)
        if number is None and len(self._numbers) < MOST_STACKS:
            number = self._numbers[stack] = len(self._counts)
            self._counts.append(0)
        return number

    def _frames(self, stack: Stack) -> tuple[Frame, ...]:
        """Outermost first, without our own frames."""
        frames = []
        for place, instruction in zip(stack[-2::-2], stack[::-2], strict=True):
            code = self._codes[place]
            if "/stepscope/measure/" not in code.co_filename:
                lines = code.co_lines()
                here = (line for start, end, line in lines if start <= instruction < end)
                line = next(here, None) or code.co_firstlineno
                frames.append((code.co_filename, line, code.co_qualname))
        return tuple(frames)
