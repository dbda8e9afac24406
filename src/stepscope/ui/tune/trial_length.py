"""How many steps a trial makes: as many as were asked for, and more where steps are short.

Thirty steps of 20 ms last less than a second, as long as a single hiccup of the host. Starting the
command takes far longer than the steps that are added here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from stepscope.ui.tune.trial_run import TrialRun

LEAST_MS = 2000.0  # of steps, together
MOST_TIMES = 5  # of what was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLength:
    """The rule of one tune."""

    asked: int
    baseline_ms: float | None = None
    predicted_ms: Mapping[frozenset[str], float] = field(default_factory=dict)

    def steps(self, remedies: Sequence[str], trials: Sequence[TrialRun]) -> int:
        """Never fewer than the command as it is makes: losses are compared with its losses."""
        return max(self._lasting(self.baseline_ms), self._lasting(self._pace(remedies, trials)))

    def _lasting(self, step_ms: float | None) -> int:
        if not step_ms:
            return self.asked
        return max(self.asked, min(math.ceil(LEAST_MS / step_ms), MOST_TIMES * self.asked))

    def _pace(self, remedies: Sequence[str], trials: Sequence[TrialRun]) -> float | None:
        """As it ran last; else as predicted, or as the fastest of its parts, whichever is less."""
        wanted = frozenset(remedies)
        ran = [trial for trial in trials if trial.counts]
        same = [_middle(trial) for trial in ran if frozenset(trial.remedies) == wanted]
        return same[-1] if same else min(self._guesses(wanted, ran), default=None)

    def _guesses(self, wanted: frozenset[str], ran: Sequence[TrialRun]) -> Iterator[float]:
        if wanted in self.predicted_ms:
            yield self.predicted_ms[wanted]
        yield from (_middle(trial) for trial in ran if frozenset(trial.remedies) < wanted)


def _middle(trial: TrialRun) -> float:
    return float(np.median(trial.step_ms))
