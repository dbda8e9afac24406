"""Every step's times, measured without the profiler: wall, device, and phases.

Each nanosecond of the training thread belongs to one phase: data (inside the data loader), backward
(inside autograd), optimizer (inside optimizer steps), forward (from a batch's arrival to the start
of backward), other (the rest). They add up to the step.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PHASES = ("data", "forward", "backward", "optimizer", "other")


class StepClock:
    """Attributes time to the phase that is on top. A call costs well under a microsecond."""

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        self._began = self._since = now()
        self._spent = dict.fromkeys(PHASES, 0)
        self._stack = ["other"]
        self._sees_data = False

    def enter(self, phase: str) -> None:
        """A phase begins inside whatever runs."""
        self._charge()
        self._stack.append(phase)

    def leave(self, phase: str) -> None:
        """The phase ends; a stray end (a hook added in the middle) changes nothing."""
        self._charge()
        if len(self._stack) > 1 and self._stack[-1] == phase:
            self._stack.pop()
        if len(self._stack) == 1:
            self._stack[0] = self._after(phase)

    def finish(self) -> dict[str, int]:
        """Close the step, return its times, begin the next one."""
        now = self._charge()
        row = {"wall_ns": now - self._began}
        row |= {f"{phase}_ns": spent for phase, spent in self._spent.items()}
        self._spent = dict.fromkeys(PHASES, 0)
        self._began = now
        return row

    def restart(self) -> None:
        """Time since the last step ended was ours (a window opened or closed), not the step's."""
        self._began = self._since = self._now()

    def _charge(self) -> int:
        now = self._now()
        self._spent[self._stack[-1]] += now - self._since
        self._since = now
        return now

    def _after(self, phase: str) -> str:
        """What runs between phases: a batch is followed by forward, the rest by odds and ends.

        A script without a data loader gives no such sign: there everything outside backward and
        the optimizer counts as forward.
        """
        self._sees_data |= phase == "data"
        return "forward" if phase == "data" or not self._sees_data else "other"


class DeviceClock:
    """Device time of steps from CUDA events: recorded on the hot path, read in the background."""

    def __init__(self) -> None:
        torch = sys.modules["torch"]
        self._cuda: Any = torch.cuda if torch.cuda.is_available() else None
        self._last: Any = None

    def restart(self) -> None:
        """The next step's device time begins now."""
        self._last = None
        self.mark()

    def mark(self) -> Any:
        """The pair of events around the step that just ended, or None without a device."""
        if self._cuda is None or not self._cuda.is_initialized():
            return None
        if self._cuda.is_current_stream_capturing():
            self._last = None
            return None
        event = self._cuda.Event(enable_timing=True)
        event.record()
        pair = (self._last, event) if self._last is not None else None
        self._last = event
        return pair


def with_device_time(row: dict[str, Any]) -> dict[str, Any] | None:
    """In the writer's thread: replace the events by nanoseconds once the device got there."""
    pair = row.get("events")
    if pair is None:
        return {key: value for key, value in row.items() if key != "events"}
    if not pair[1].query():
        return None
    done = {key: value for key, value in row.items() if key != "events"}
    done["device_ns"] = round(pair[0].elapsed_time(pair[1]) * 1e6)
    return done
