"""Every step's times, measured without the profiler: wall, device, and phases.

Each nanosecond of the training thread belongs to one phase: data (inside the data loader), backward
(inside autograd), optimizer (inside optimizer steps), forward (from a batch's arrival to the start
of backward), other (the rest). They add up to the step.

The training thread only notes events with their times; the writer's thread attributes the time,
many steps at once. Between two notes the training evicts the processor's caches, so a line of
Python costs several times as much there as in a loop of its own.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from stepscope.measure.never_raise import note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

PHASES = ("data", "forward", "backward", "optimizer", "other")
ENTER, LEAVE, ENDED, AGAIN, PERHAPS = range(5)
_TEXT = (
    '"step": %d, "wall_ns": %d, '
    + "".join(f'"{phase}_ns": %d, ' for phase in PHASES)
    + '"end_unix_ns": %d, "window": %s'
)

# An event, its time by the performance counter, and its subject: a phase, or the step that ended.
Note = tuple[int, int, Any]


# What only the training thread knows about a step that ends: its number, the wall clock, whether
# the profiler ran, the device's events around it, marks of what is unusual, and whether the first
# PERHAPS since the previous step's end also ended a step.
Ended = tuple[int, int, bool, Any, tuple[str, ...], bool]


class StepClock:
    """Attributes time to the innermost phase."""

    def __init__(self, began_ns: int = 0) -> None:
        self._began = self._since = began_ns
        self._spent = dict.fromkeys(PHASES, 0)
        self._stack = ["other"]
        self._sees_data = False
        self._perhaps: tuple[int, int, dict[str, int]] | None = None

    def read(self, notes: Iterable[Note]) -> Iterator[tuple[Ended, int, dict[str, int]]]:
        """Every step that ended, its wall time and its phases' times, which add up to it.

        The end of a phase that never began (a hook added in the middle) changes nothing. AGAIN says
        that the time since the last step's end was ours (a window opened), not the next step's.
        """
        stack = self._stack
        for what, now, it in notes:
            if what != AGAIN:
                self._spent[stack[-1]] += now - self._since
            self._since = now
            if what == ENTER:
                stack.append(it)
            elif what == LEAVE:
                if len(stack) > 1 and stack[-1] == it:
                    stack.pop()
                if len(stack) == 1:
                    stack[0] = self._after(it)
            elif what == PERHAPS:
                self._perhaps = self._perhaps or (it, now - self._began, dict(self._spent))
            else:
                wall, spent = now - self._began, self._spent
                self._began = now
                self._spent = dict.fromkeys(PHASES, 0)
                if what == ENDED:
                    yield from self._split(it, wall, spent)
                self._perhaps = None

    def _split(
        self, ended: Ended, wall: int, spent: dict[str, int]
    ) -> Iterator[tuple[Ended, int, dict[str, int]]]:
        """One step, or two when the first was not recognised as one at its end."""
        number, _, window, _, _, two = ended
        if two and self._perhaps is not None:
            unix_ns, until, before = self._perhaps
            yield (number - 1, unix_ns, window, None, (), False), until, before
            wall -= until
            spent = {phase: spent[phase] - before[phase] for phase in PHASES}
        yield ended, wall, spent

    def _after(self, phase: str) -> str:
        """The phase that follows this one: forward after a batch, "other" after the rest.

        In a script without a data loader everything outside backward and the optimizer counts as
        forward.
        """
        self._sees_data |= phase == "data"
        return "forward" if phase == "data" or not self._sees_data else "other"


class StepLines:
    """In the writer's thread: notes become lines of steps.jsonl."""

    def __init__(self, began_ns: int) -> None:
        self._clock = StepClock(began_ns)
        self._waiting: deque[tuple[str, Any]] = deque()  # for the device

    def __call__(self, rows: Iterable[Note], *, last: bool = False) -> list[str]:
        """Lines that are complete, in the order of their steps; `last`: nothing will follow."""
        for step, wall_ns, spent in self._clock.read(rows):
            self._waiting.append((_text(step, wall_ns, spent), step[3]))
        return self._complete(last=last)

    def _complete(self, *, last: bool) -> list[str]:
        lines = []
        while self._waiting:
            text, events = self._waiting[0]
            device = _device(events) if events is not None else ""
            if device is None and not last:
                break
            self._waiting.popleft()
            lines.append(f"{{{text}{device or ''}}}")
        return lines


def _text(step: Ended, wall_ns: int, spent: dict[str, int]) -> str:
    """A JSON object without its braces: formatting costs a third of what json.dumps does."""
    number, unix_ns, window, _, marks, _ = step
    profiled = "true" if window else "false"
    text = _TEXT % (number, wall_ns, *spent.values(), unix_ns, profiled)
    return text + "".join([f', "{mark}": true' for mark in marks]) if marks else text


def _device(events: Any) -> str | None:
    """None while the device is still busy; empty when its time cannot be read."""
    try:
        if not events[1].query():
            return None
        return f', "device_ns": {round(events[0].elapsed_time(events[1]) * 1e6)}'
    except Exception as error:
        note("device time", error)
        return ""


class Anchor:
    """Decides which optimizer steps end a training step.

    The first optimizer that steps is the anchor: each of its steps ends a training step. Others
    that step in between (a GAN's second one) belong to the same training step. An optimizer that
    steps twice while the anchor does not becomes the anchor, and its first step counts too.
    """

    def __init__(self) -> None:
        self._anchor: Callable[[], Any] = lambda: None
        self._others: weakref.WeakSet[Any] | None = None  # stepped once since the anchor did

    def ends_steps(self, optimizer: Any) -> int:
        """Call once for every optimizer step: how many training steps have ended by now."""
        anchor = self._anchor()
        again = self._others is not None and optimizer in self._others
        if anchor is optimizer or anchor is None or again:
            self._anchor = weakref.ref(optimizer)
            self._others = None
            return 2 if again else 1
        if self._others is None:
            self._others = weakref.WeakSet()
        self._others.add(optimizer)
        return 0


class DeviceClock:
    """Device time of steps from CUDA events: recorded on the hot path, read in the background."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._last: Any = None

    @classmethod
    def here(cls) -> DeviceClock | None:
        """None without a CUDA device."""
        cuda = sys.modules["torch"].cuda
        return cls(cuda) if cuda.is_available() else None

    def restart(self) -> None:
        """The next step's device time begins now."""
        self._last = None
        self.mark()

    def mark(self) -> Any:
        """The pair of events around the step that just ended, or None where there is none."""
        if not self._cuda.is_initialized():
            return None
        if self._cuda.is_current_stream_capturing():
            self._last = None
            return None
        event = self._cuda.Event(enable_timing=True)
        event.record()
        pair = (self._last, event) if self._last is not None else None
        self._last = event
        return pair
