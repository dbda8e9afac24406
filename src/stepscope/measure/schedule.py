"""Which step does what, from the step's number alone: the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.measure.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """wait, warmup, active, as often as repeat says; then one step for memory."""

    wait: int
    warmup: int
    active: int
    repeat: int
    memory: bool

    @classmethod
    def of(cls, settings: Settings) -> Schedule:
        return cls(
            wait=max(1, settings.wait),
            warmup=settings.warmup,
            active=settings.active,
            repeat=max(1, settings.repeat),
            memory=settings.memory,
        )

    @property
    def cycle(self) -> int:
        return self.wait + self.warmup + self.active

    def opens(self, step: int) -> int | None:
        """The number of the window whose first step this is."""
        window, place = divmod(step, self.cycle)
        return window if place == self.wait and window < self.repeat else None

    def closes(self, step: int) -> bool:
        """Whether a window's last step is just over when this one begins."""
        window, place = divmod(step, self.cycle)
        return place == 0 and 0 < window <= self.repeat

    def measures_memory(self, step: int) -> bool:
        """One step after the last window, with a plain step in between."""
        return self.memory and step == self.cycle * self.repeat + 1
