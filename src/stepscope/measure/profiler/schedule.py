"""What happens in which step, by the step's number alone: the same on every rank."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from stepscope.measure.folder import COMMS, TRACE
from stepscope.records.folders import step_trace

if TYPE_CHECKING:
    from stepscope.measure.settings import Settings

DEFAULT_WAIT = 10
LINES = TRACE.replace(".", "-lines.", 1)


# Early ones are replaced by later windows, in case the script ends before those. Regular ones are
# those of `--every`, `asked` ones somebody requested while the job ran (extra_windows.py); `lines`
# marks the user's lines.
Kind = Literal["early", "planned", "regular", "stall", "asked", "lines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWindow:
    """Steps `first` to `last`; those before `first_active` only warm the profiler up."""

    first: int
    warmup: int
    active: int
    file: str = TRACE  # a later window with the same file replaces it
    kind: Kind = "planned"

    @property
    def alone(self) -> bool:
        """Whether only this rank records it."""
        return self.kind in ("stall", "lines")

    @property
    def first_active(self) -> int:
        return self.first + self.warmup

    @property
    def last(self) -> int:
        return self.first_active + self.active - 1

    @property
    def meets(self) -> bool:
        """Whether the ranks compare their clocks before and after it."""
        return self.kind in ("early", "planned", "regular")

    @property
    def comms_file(self) -> str:
        """Regular windows and those asked for have one of their own, which goes with the trace."""
        own = self.kind in ("regular", "asked")
        return f"comms-step-{self.first_active}.jsonl" if own else COMMS


# A script may end or be killed after a few steps, so short windows come first; each later window
# replaces the trace. The first step is left out: it sets things up.
_EARLY = (
    PlannedWindow(first=1, warmup=1, active=1, kind="early"),
    PlannedWindow(first=6, warmup=1, active=2, kind="early"),
)
_EARLY_MEMORY = 5
_HOST_STEPS = 5  # every second one also stops inside forward


@dataclass(slots=True, kw_only=True)
class Schedule:
    """The windows in order, and the steps that measure memory. Windows of `--every` follow, without
    end; `extra` is one around a stall, `asked` one that somebody asked for."""

    windows: tuple[PlannedWindow, ...]
    memory_steps: tuple[int, ...] = ()
    host_steps: tuple[int, ...] = ()  # those that no window needs
    every: int = 0  # 0: no regular windows
    regular: PlannedWindow | None = None  # the first one
    extra: PlannedWindow | None = None
    asked: PlannedWindow | None = None

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
        lines = (
            (PlannedWindow(first=memory[-1] + 2, warmup=1, active=2, file=LINES, kind="lines"),)
            if settings.lines
            else ()
        )
        past = lines[0].last if lines else memory[-1]
        every, regular = regular_distance(settings), None
        if every:
            first = -(-(past + 2) // every) * every
            regular = PlannedWindow(
                first=first,
                warmup=settings.warmup,
                active=settings.active,
                file=step_trace(first + settings.warmup),
                kind="regular",
            )
        return cls(
            windows=(*(_EARLY if adaptive else ()), *asked, *lines),
            memory_steps=memory if settings.memory else (),
            host_steps=tuple(range(past + 2, past + 2 + _HOST_STEPS)),
            every=every,
            regular=regular,
        )

    @property
    def last_due(self) -> int:
        """The first step after everything that is planned once."""
        return max([-1, *(window.last for window in self.windows), *self.memory_steps]) + 1

    def opens(self, step: int) -> PlannedWindow | None:
        """The window whose first step this is."""
        return next((window for window in self._around(step) if window.first == step), None)

    def closes(self, step: int) -> PlannedWindow | None:
        """The window whose last step was the previous one."""
        return next((window for window in self._around(step) if window.last + 1 == step), None)

    def is_special(self, step: int) -> bool:
        return step in self.memory_steps or step in self.host_steps

    def measures_memory(self, step: int) -> bool:
        return step in self.memory_steps

    def stops_in_forward(self, step: int) -> bool:
        return step in self.host_steps[1::2]

    def next_due(self, step: int) -> int:
        """The first step, from this one on, that something has to happen before."""
        host = (place for place in (*self.host_steps, sys.maxsize) if place >= step)
        return min(self._next_needed(step), *host)

    def _next_needed(self, step: int) -> int:
        """The same without steps that give way to windows."""
        windows = self._around(step)
        edges = [edge for window in windows for edge in (window.first, window.last + 1)]
        due = (place for place in (*edges, *self.memory_steps) if place >= step)
        return min(due, default=sys.maxsize)

    def is_free(self, first: int, last: int) -> bool:
        """Whether nothing else happens in these steps."""
        past = max(window.last for window in self.windows)
        return first > max(past, *self.memory_steps, 0) and self._next_needed(first - 1) > last + 2

    def _around(self, step: int) -> list[PlannedWindow]:
        """All windows, but of the regular ones only those next to this step."""
        windows = [*self.windows, *filter(None, [self.extra, self.asked])]
        if self.regular is not None:
            past = max(0, step - self.regular.first) // self.every
            for number in (past, past + 1):
                steps = number * self.every
                file = step_trace(self.regular.first_active + steps)
                windows.append(replace(self.regular, first=self.regular.first + steps, file=file))
        return windows


def regular_distance(settings: Settings) -> int:
    """Steps from one window of `--every` to the next; 0 without them. Plain steps lie between."""
    least = settings.warmup + settings.active + 2
    return max(settings.every, least) if settings.every > 0 else 0
