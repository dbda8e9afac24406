"""Where the search gets its trials from: run now, or finished before the tune was killed.

The search asks for the same trials in the same order whenever their results are the same, and its
time is the time that trials took, not that of the clock. So a tune that is resumed decides as one
that was never killed.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Protocol

from stepscope.ui.tune.journal import FinishedTrial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.ui.tune.journal import Journal
    from stepscope.ui.tune.trial_length import TrialLength
    from stepscope.ui.tune.trial_run import TrialRun


_LATER_S = 20.0  # that a trial may go on past the budget, if it takes longer than expected


class OutOfTimeError(Exception):
    """The budget has no room for another trial."""


class TrialRunner(Protocol):
    """Runs one trial, or reads a finished one; trial_run.TrialCommand does."""

    def run(
        self, number: int, remedies: Sequence[str], *, steps: int, limit_s: float
    ) -> TrialRun: ...

    def read(self, finished: FinishedTrial) -> TrialRun: ...


class TrialBench:
    """Gives the search one trial at a time, as long as the budget lasts."""

    def __init__(
        self,
        runner: TrialRunner,
        *,
        length: TrialLength,
        budget_s: float,
        limit_s: float = math.inf,
        spent_s: float = 0.0,
        journal: Journal | None = None,
        announce: Callable[[int, tuple[str, ...]], None] = lambda _number, _remedies: None,
    ) -> None:
        self._runner, self._journal, self._announce = runner, journal, announce
        self._length, self._limit_s = length, limit_s
        self._budget_s, self.spent_s = budget_s, spent_s
        self._reserve_s = 0.0
        self.trials: list[TrialRun] = []
        self._number = journal.next_number if journal is not None else 1
        self._finished: dict[tuple[str, ...], deque[FinishedTrial]] = defaultdict(deque)
        for trial in journal.trials if journal is not None else ():
            self._finished[trial.remedies].append(trial)

    def run(self, remedies: Sequence[str]) -> TrialRun:
        """OutOfTimeError if it would not end in time, or did not."""
        wanted = tuple(remedies)
        if self._finished[wanted]:
            trial = self._runner.read(self._finished[wanted].popleft())
        else:
            if not self.affords(wanted):
                raise OutOfTimeError
            trial = self._run_now(wanted)
        self.trials.append(trial)
        self.spent_s += trial.took_s
        return trial

    def affords(self, remedies: Sequence[str]) -> bool:
        """Whether one more trial with these would end in time."""
        return self.spent_s + self.expected_s(remedies) + self._reserve_s <= self._budget_s

    def reserve(self, *later: Sequence[str]) -> None:
        """Keep time for these trials, at most half of the budget."""
        self._reserve_s = min(sum(map(self.expected_s, later)), self._budget_s / 2)

    def affords_half(self) -> bool:
        """Whether a run of the command as it is would leave half of the budget for later."""
        return self.spent_s + self.expected_s(()) <= self._budget_s / 2

    @property
    def left_s(self) -> float:
        return max(0.0, self._budget_s - self.spent_s)

    def expected_s(self, remedies: Sequence[str]) -> float:
        """How long a trial with these takes: as long as the last one with the same, else as the
        command as it is and what each of them took longer alone, such as to compile."""
        wanted = tuple(remedies)
        plain_s = self._last_s(()) or 0.0
        known_s = self._last_s(wanted)
        if known_s is not None:
            return known_s
        alone = (self._last_s((remedy,)) for remedy in wanted)
        return plain_s + sum(max(0.0, took_s - plain_s) for took_s in alone if took_s is not None)

    def _last_s(self, remedies: tuple[str, ...]) -> float | None:
        same = (trial.took_s for trial in reversed(self.trials) if trial.remedies == remedies)
        return next(same, None)

    def _run_now(self, remedies: tuple[str, ...]) -> TrialRun:
        self._announce(self._number, remedies)
        steps = self._length.steps(remedies, self.trials)
        left_s = self.left_s + _LATER_S
        trial = self._runner.run(
            self._number, remedies, steps=steps, limit_s=min(self._limit_s, left_s)
        )
        if trial.was_ended and left_s < self._limit_s:
            raise OutOfTimeError
        if self._journal is not None:
            self._journal.add(
                FinishedTrial(
                    number=trial.number,
                    remedies=trial.remedies,
                    folder=trial.folder,
                    took_s=trial.took_s,
                    failed=trial.failed,
                    output=trial.output,
                )
            )
        self._number += 1
        return trial
