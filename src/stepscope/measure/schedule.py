"""What happens in which step, by the step's number alone: the same on every rank."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.measure.folder import TRACE

if TYPE_CHECKING:
    from stepscope.measure.settings import Settings

DEFAULT_WAIT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWindow:
    """Steps `first` to `last`; those before `first_active` only warm the profiler up."""

    first: int
    warmup: int
    active: int
    file: str = TRACE  # a later window with the same file replaces it

    @property
    def first_active(self) -> int:
        return self.first + self.warmup

    @property
    def last(self) -> int:
        return self.first_active + self.active - 1


# A script may end or be killed after a few steps, so short windows come first; each later window
# replaces the trace. The first step is left out: it sets things up.
_EARLY = (PlannedWindow(first=1, warmup=1, active=1), PlannedWindow(first=6, warmup=1, active=2))
_EARLY_MEMORY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The windows in order, and the steps that measure memory."""

    windows: tuple[PlannedWindow, ...]
    memory_steps: tuple[int, ...] = ()

    @classmethod
    def plan(cls, settings: Settings) -> Schedule:
        """As the settings ask; early windows come first unless they say how long to wait."""
        adaptive = settings.wait is None
        # The first step cannot be recorded: its beginning was not seen.
        wait = DEFAULT_WAIT if settings.wait is None else max(1, settings.wait)
        cycle = wait + settings.warmup + settings.active
        asked = [
            PlannedWindow(
                first=number * cycle + wait,
                warmup=settings.warmup,
                active=settings.active,
                file=TRACE if number == 0 else TRACE.replace(".", f"-{number}.", 1),
            )
            for number in range(max(1, settings.repeat))
        ]
        # One plain step between the last window and the memory step.
        memory = (*([_EARLY_MEMORY] if adaptive else []), asked[-1].last + 2)
        return cls(
            windows=(*(_EARLY if adaptive else ()), *asked),
            memory_steps=memory if settings.memory else (),
        )

    def opens(self, step: int) -> PlannedWindow | None:
        """The window whose first step this is."""
        return next((window for window in self.windows if window.first == step), None)

    def closes(self, step: int) -> bool:
        """Whether the previous step was a window's last."""
        return any(window.last + 1 == step for window in self.windows)

    def measures_memory(self, step: int) -> bool:
        return step in self.memory_steps

    def next_due(self, step: int) -> int:
        """The first step, from this one on, that something has to happen before."""
        edges = [edge for window in self.windows for edge in (window.first, window.last + 1)]
        due = (place for place in (*edges, *self.memory_steps) if place >= step)
        return min(due, default=sys.maxsize)
