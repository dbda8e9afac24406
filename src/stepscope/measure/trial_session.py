"""A capture with remedies applied, or of a trial that ends itself after some steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.measure.ranks import rank_and_world
from stepscope.measure.session import Session
from stepscope.measure.trial import TrialLog, await_device, end_process

if TYPE_CHECKING:
    from stepscope.fix.begin import ChangedTraining
    from stepscope.measure.rank_parts import RankParts
    from stepscope.measure.settings import Settings


class TrialSession(Session):
    """A Session that also keeps what trials need."""

    trial: TrialLog

    def __init__(self, settings: Settings, training: ChangedTraining | None) -> None:
        self.trial = TrialLog(training, settings.stop_after, keep_losses=settings.trial)
        super().__init__(settings, from_outside=True)

    def _next_due(self, step: int) -> int:
        return min(super()._next_due(step), self.trial.stop_after)

    def _act(self, parts: RankParts) -> None:
        if self.number >= self.trial.stop_after:
            await_device()  # the host may be many steps ahead: their times would not be known
            self.close()
            end_process(parts.folder, rank_and_world()[1])
        super()._act(parts)

    def _describe(self, status: str) -> None:
        if status == "finished" and self._parts is not None:
            self.trial.write(self._parts.folder)
        super()._describe(status)
