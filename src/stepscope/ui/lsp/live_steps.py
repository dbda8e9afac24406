"""How far a training is that a profile has started, read from its run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.errors import StepscopeError
from stepscope.ui.lsp.script_state import LiveStep

if TYPE_CHECKING:
    from pathlib import Path


class LiveSteps:
    """Reads what was added since the last look."""

    def __init__(self, folder: Path) -> None:
        from stepscope.trace.follow_run import (
            RunFollower,
        )  # it needs numpy: the server starts first

        self._follower = RunFollower(folder)

    def look(self) -> LiveStep:
        """Of the rank that is furthest."""
        try:
            ranks = self._follower.read().ranks
        except StepscopeError:
            ranks = ()
        steps = max((rank.steps for rank in ranks), key=lambda one: one.seen, default=None)
        if steps is None or not steps.seen:
            return LiveStep(step=0, step_ms=None, message="starting up")
        step_ms = steps.whole_ns / steps.whole / 1e6 if steps.whole else None
        return LiveStep(step=steps.seen, step_ms=step_ms, message="training")
