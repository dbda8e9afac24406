"""Trials that are checked and compared: one alone, or fresh pairs until they decide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.errors import NotCapturedError
from stepscope.ui.tune.contenders import BASELINE
from stepscope.ui.tune.rules import Controls
from stepscope.ui.tune.trial_bench import OutOfTimeError
from stepscope.verify.tuned_gain import TimedTrial, judge, screen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stepscope.fix.chosen import ChosenFix
    from stepscope.ui.tune.contenders import PairTest
    from stepscope.ui.tune.rules import CheckedTrial, TrialRules
    from stepscope.ui.tune.trial_bench import TrialBench
    from stepscope.ui.tune.trial_run import TrialRun
    from stepscope.verify.tuned_gain import Screening


class PairRuns:
    """The runs of one search, and what they say."""

    def __init__(self, bench: TrialBench, rules: TrialRules) -> None:
        self._bench, self._rules, self._controls = bench, rules, Controls()
        self.bases: list[TrialRun] = []  # the command as it is

    def run_base(self) -> None:
        trial = self._bench.run(BASELINE)
        if not trial.counts:
            raise NotCapturedError(
                f"the unchanged command could not be measured: {trial.failed}", *trial.output
            )
        self.bases.append(trial)

    def screen(self, trial: TrialRun, base: Sequence[TrialRun]) -> Screening:
        """One run against those of its base that are nearest in time."""
        return screen(_timed(trial), list(map(_timed, base)), self._timed_trials())

    def pairs_of(self, test: PairTest, members: Sequence[ChosenFix], level: float) -> Iterator[int]:
        """Run pairs until the test is decided; yields the number of each before it runs."""
        while True:
            yield len(test.pairs) + 1
            base_first = len(test.pairs) % 2 == 0
            order = (test.base, test.challenger) if base_first else (test.challenger, test.base)
            trials = {configuration: self._bench.run(configuration) for configuration in order}
            base, challenger = trials[test.base], trials[test.challenger]
            if test.base == BASELINE and base.counts:
                self.bases.append(base)
            why, test.checked = self.why_out(challenger, members)
            why = why or (
                f"the run of the baseline beside it failed: {base.failed}" if base.failed else None
            )
            if why is not None:
                test.why = why
                return
            test.pairs.append((base, challenger))
            timed = [(_timed(a), _timed(b)) for a, b in test.pairs]
            test.verdict = judge(timed, self._timed_trials(), level)
            if test.verdict.decision != "more runs":
                test.kept = test.verdict.decision == "kept"
                test.why = test.verdict.why
                return

    def why_out(
        self, trial: TrialRun, members: Sequence[ChosenFix]
    ) -> tuple[str | None, CheckedTrial | None]:
        """Why this trial cannot be kept, however fast it is."""
        if not trial.counts:
            return f"failed: {trial.failed}", None
        if trial.unapplied:
            name, why = next(iter(trial.unapplied.items()))
            return (why if len(members) == 1 else f"{name}: {why}"), None
        checked = self._rules.look(self.bases, trial, members, self._controls)
        while checked.control is not None:
            self._measure_control(checked.control)
            checked = self._rules.look(self.bases, trial, members, self._controls)
        return checked.why_out, checked

    def _measure_control(self, kind: str) -> None:
        """What chance does to the losses; without time for it, it stays unknown."""
        runs = self._controls.runs.setdefault(kind, [])
        try:
            for number in (1, 2):
                trial = self._bench.run((f"{kind}{':' if '=' in kind else '='}{number}",))
                if trial.counts and not trial.unapplied:
                    runs.append(trial)
        except OutOfTimeError:
            pass

    def _timed_trials(self) -> list[TimedTrial]:
        return [_timed(trial) for trial in self._bench.trials if trial.counts]


def _timed(trial: TrialRun) -> TimedTrial:
    return TimedTrial(
        remedies=trial.remedies, number=trial.number, steps_ms=tuple(trial.step_ms.tolist())
    )
