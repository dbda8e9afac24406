"""Steps that measure something more than their time: memory by category, the host's own time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.measure import folder as layout
from stepscope.measure.host_step import HostStep
from stepscope.measure.memory import MemoryStep
from stepscope.measure.never_raise import never_raise
from stepscope.measure.ranks import rank_and_world

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from stepscope.measure.schedule import Schedule
    from stepscope.measure.settings import Settings


class SpecialSteps:
    """At most one of them runs at a time."""

    def __init__(self) -> None:
        self._memory: MemoryStep | None = None
        self._host: HostStep | None = None
        self._number = 0
        self._hosts: list[dict[str, Any]] = []

    @property
    def mark(self) -> str | None:
        """What steps.jsonl says of the running step; None for a plain one."""
        return "memory" if self._memory is not None else "host" if self._host is not None else None

    def begin(
        self, number: int, schedule: Schedule, optimizers: Iterable[Any], settings: Settings
    ) -> None:
        if schedule.measures_memory(number):
            self._memory = MemoryStep(list(optimizers), lines=settings.lines)
            self._memory.begin()
        else:
            self._begin_host(number, fine=schedule.stops_in_forward(number))

    @never_raise
    def _begin_host(self, number: int, *, fine: bool) -> None:
        if HostStep.is_possible():
            self._number = number
            self._host = HostStep(fine=fine, alone=rank_and_world()[1] == 1)
            self._host.begin()

    def phase(self, name: str, *, entering: bool) -> None:
        if self._memory is not None:
            self._memory.phase(name, entering=entering)
        elif self._host is not None:
            self._host.phase(name, entering=entering)

    @never_raise
    def pass_begins(self, roots: Any) -> None:
        if self._host is not None:
            self._host.pass_begins(roots)

    def end(self, folder: Path) -> bool:
        """Keep what the step that ended has measured; whether rank.json has to be written again."""
        memory, self._memory = self._memory, None
        if memory is not None:
            layout.try_write_json(folder / layout.MEMORY, memory.end())
        return bool(self._end_host())

    @never_raise
    def _end_host(self) -> bool:
        host, self._host = self._host, None
        measured = host.end() if host is not None else None
        if measured is None:
            return False
        self._hosts.append({"step": self._number, **measured})
        return True

    @never_raise
    def abandon(self) -> None:
        """The script ends in the middle of such a step."""
        memory, host = self._memory, self._host
        self.forget()
        if memory is not None:
            memory.end()
        if host is not None:
            host.leave()

    def forget(self) -> None:
        """In a forked child."""
        self._memory = self._host = None

    def content(self) -> list[dict[str, Any]]:
        """The host's own times, for rank.json."""
        return self._hosts
