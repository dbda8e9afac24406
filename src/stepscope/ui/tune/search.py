"""What to try next and what to keep: every candidate alone, then the winners together.

1. The command runs as it is, twice; then each candidate once, with a run of the command as it is
   after every third. What crashes, changes nothing, breaks parity or needs too much memory is out.
2. The promising ones are confirmed, best first, in fresh pairs of runs. What is kept joins the
   base, and the next one has to beat that. Of a family only one is kept; a better member
   replaces it.
3. What did not help alone is tried once more on top of what was kept; what was clearly worse
   alone too, once the step is less than half of what it was.
4. The whole combination is confirmed against the command as it is.

verify.tuned_gain decides what is promising and what is sure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.errors import NotCapturedError
from stepscope.fix.remedies import FIXES
from stepscope.ui.tune.contenders import (
    BASELINE,
    Configuration,
    Contender,
    PairTest,
    Rescreened,
)
from stepscope.ui.tune.journal import PlannedRemedy
from stepscope.ui.tune.rules import Controls
from stepscope.ui.tune.trial_bench import OutOfTimeError
from stepscope.verify.tuned_gain import (
    FALSE_KEEPS,
    FEWEST_PAIRS,
    WORTH,
    TimedTrial,
    judge,
    level_of_next_test,
    screen,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepscope.fix.chosen import ChosenFix
    from stepscope.ui.tune.rules import CheckedTrial, TrialRules
    from stepscope.ui.tune.trial_bench import TrialBench
    from stepscope.ui.tune.trial_run import TrialRun

_BETWEEN_BASES = 3  # candidates that run between two runs of the base
_CONFIRMED = 3  # candidates that there must be time to confirm while others are screened
ANOTHER_STEP = 0.5  # of the step as it was: what was worse then is tried again
_NO_TIME = "the budget leaves no time to try it and to confirm it"
_STOPPED = "tune was stopped before it was tried"


class Search:
    """One tune. `run` may be interrupted at any time: what is known then is in the attributes."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        bench: TrialBench,
        rules: TrialRules,
        *,
        late: Sequence[ChosenFix] = (),
    ) -> None:
        """`late` are remedies that may fit once another one is kept."""
        self.contenders = list(contenders)
        self._late = list(late)
        self._by_name = {contender.name: contender for contender in contenders}
        self._bench, self._rules, self._controls = bench, rules, Controls()
        self.bases: list[TrialRun] = []  # the command as it is
        self.tests: list[PairTest] = []
        self._expected = 0  # tests that the tune is likely to make
        self.rescreened: dict[Configuration, Rescreened] = {}  # by the whole configuration
        self.kept: Configuration = BASELINE
        self.final: PairTest | None = None
        self.doing = "the command as it is"
        self.done = False
        self.out_of_time = False

    def run(self) -> None:
        """Until everything is decided or the budget is spent."""
        for part in (self._measure_bases, self._screen_and_combine, self._confirm_combination):
            try:
                part()
            except OutOfTimeError:
                self.out_of_time = True
        self.out_of_time |= bool(self.not_tried())
        self.done = True

    def _screen_and_combine(self) -> None:
        """What there was no time to screen at first is screened if confirming took less."""
        while screened := self._screen_all():
            self._combine(screened)

    # 1. Each alone.

    def _measure_bases(self) -> None:
        """Two, so that chance is known: how starts differ, and whether losses repeat."""
        for _ in range(2):
            self._run_base()

    def _run_base(self) -> None:
        trial = self._bench.run(BASELINE)
        if not trial.counts:
            raise NotCapturedError(
                f"the command as it is could not be measured: {trial.failed}", *trial.output
            )
        self.bases.append(trial)

    def _screen_all(self) -> list[Contender]:
        """Those that ran just now. What is predicted not to help comes last, and not in the time
        that confirming needs."""
        first = not any(contender.alone for contender in self.contenders)
        self._bench.reserve(*_pairs(BASELINE, BASELINE) * (_CONFIRMED if first else 1))
        screened: list[Contender] = []
        try:
            self._screen_in_turn(screened, first=first)
        finally:  # also when tune is stopped meanwhile: what ran is known
            self._compare_screened(screened)
        return screened

    def _screen_in_turn(self, screened: list[Contender], *, first: bool) -> None:
        since_base = 0
        for number, contender in enumerate(self.contenders, 1):
            if contender.alone is not None or self.was_tried(contender.name):
                continue
            if first and contender.planned.hopeless and not self._bench.affords_half():
                continue
            self.doing = f"{number} of {len(self.contenders)} alone"
            try:
                contender.alone = trial = self._bench.run((contender.name,))
                screened.append(contender)
                contender.out, contender.checked = self._why_out(trial, [contender.chosen])
                since_base += 1
                if since_base == _BETWEEN_BASES:
                    since_base = 0
                    self._run_base()
            except OutOfTimeError:
                break
        self._reserve_confirmation()
        if since_base and self._bench.affords(BASELINE):
            self._run_base()

    def _compare_screened(self, screened: Sequence[Contender]) -> None:
        """Only now: a run of the base after a candidate counts as well as the one before."""
        for contender in screened:
            if contender.alone is not None and contender.alone.counts:
                contender.screening = screen(
                    _timed(contender.alone), list(map(_timed, self.bases)), self._timed_trials()
                )

    # 2. and 3. The winners together.

    def _combine(self, screened: Sequence[Contender]) -> None:
        promising = sorted(
            (contender for contender in screened if contender.is_promising),
            key=lambda contender: -contender.gain,
        )
        self._expected = self._expected or max(1, len(promising))  # it must not change later
        waiting = promising
        while waiting:
            for contender in self._one_per_family_first(waiting):
                try:
                    self._challenge(contender)
                except OutOfTimeError:  # the next one may take less
                    self.out_of_time = True
            waiting = self._worth_another_try()

    def _one_per_family_first(self, contenders: Iterable[Contender]) -> list[Contender]:
        """The others of a family only matter if they may be better than the one that is kept."""
        first: list[Contender] = []
        others: list[Contender] = []
        seen: set[str] = set()
        for contender in contenders:
            family = contender.chosen.family
            (others if family in seen else first).append(contender)
            seen.add(family)
        return [*first, *others]

    def _challenge(self, contender: Contender) -> None:
        """What is kept, with this one: kept in its place if that is surely faster."""
        challenger = self._with(contender)
        if challenger == self.kept or self.kept in contender.tested_on:
            return
        rival = self._rival(contender)
        if rival is not None and not self._may_beat(contender, rival, challenger):
            return
        contender.tested_on.add(self.kept)
        test = PairTest(base=self.kept, challenger=challenger)
        self.tests.append(test)
        outcomes = [earlier.kept for earlier in self.tests[:-1]]
        self._run_pairs(test, level_of_next_test(outcomes, self._expected))
        if test.kept:
            self.kept = challenger
            self._reserve_confirmation()

    def _run_pairs(self, test: PairTest, level: float) -> None:
        while True:
            self.doing = f"{_words(test.challenger)}, pair {len(test.pairs) + 1}"
            base_first = len(test.pairs) % 2 == 0
            order = (test.base, test.challenger) if base_first else (test.challenger, test.base)
            trials = {configuration: self._bench.run(configuration) for configuration in order}
            base, challenger = trials[test.base], trials[test.challenger]
            if test.base == BASELINE and base.counts:
                self.bases.append(base)
            members = self._members(test.challenger)
            why, test.checked = self._why_out(challenger, members)
            why = why or (f"the run beside it failed: {base.failed}" if base.failed else None)
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

    def _worth_another_try(self) -> list[Contender]:
        """On top of what is kept now: run once, and those that look promising are confirmed."""
        if self.kept == BASELINE:
            return []
        self._admit_late()
        again = [contender for contender in self.contenders if self._may_help_now(contender)]
        promising = []
        for contender in again:
            challenger = self._with(contender)
            if challenger in self.rescreened:
                continue
            self.doing = f"{_words(challenger)} once"
            base = [test_run for test_run in self._bench.trials if self._is_kept(test_run)]
            try:
                trial = self._bench.run(challenger)
            except OutOfTimeError:
                self.out_of_time = True
                continue
            why, _ = self._why_out(trial, self._members(challenger))
            if why is not None:
                contender.tested_on.add(self.kept)
                continue
            screening = screen(_timed(trial), list(map(_timed, base)), self._timed_trials())
            self.rescreened[challenger] = Rescreened(self.kept, screening)
            if screening.promising:
                promising.append((screening.gain.value, contender))
        return [contender for _, contender in sorted(promising, key=lambda pair: -pair[0])]

    def _admit_late(self) -> None:
        """Those that wait for a family that is kept, and fit the training as it is now."""
        facts = next(trial.facts for trial in reversed(self._bench.trials) if self._is_kept(trial))
        families = {member.family for member in self._members(self.kept)}
        for chosen in list(self._late):
            if not chosen.remedy.after & families or facts is None:
                continue
            if chosen.remedy.fits(facts, chosen.value) is None:
                self._late.remove(chosen)
                late = Contender(planned=PlannedRemedy(remedy=str(chosen)), chosen=chosen)
                self.contenders.append(late)
                self._by_name[late.name] = late

    def _may_help_now(self, contender: Contender) -> bool:
        """It waits for a family that is kept now, even in the place of its rival; or was not
        clearly worse alone, or the step is another one by now."""
        if contender.out or self.kept in contender.tested_on or contender.name in self.kept:
            return False
        if self._is_new_beside_its_families(contender):
            return True
        if self._rival(contender) is not None or contender.tested_on:
            return False
        return contender.is_open or self._is_another_step()

    def _is_another_step(self) -> bool:
        """What is kept leaves so little of the step that something else limits it, and what a
        remedy did to the whole no longer tells."""
        kept = [_middle(trial) for trial in self._bench.trials if self._is_kept(trial)]
        return min(kept) < ANOTHER_STEP * min(map(_middle, self.bases))

    def _is_new_beside_its_families(self, contender: Contender) -> bool:
        """It never ran together with a kept member of the families it is tried again after."""
        after = contender.chosen.remedy.after
        waited_for = [one for one in self._members(self.kept) if one.family in after]
        return any(
            not any({contender.name, str(one)} <= set(run.remedies) for run in self._bench.trials)
            for one in waited_for
        )

    # 4. The answer.

    def _reserve_confirmation(self) -> None:
        """Time to confirm what is kept against the command as it is."""
        self._bench.reserve(*() if self.kept == BASELINE else _pairs(BASELINE, self.kept))

    def _confirm_combination(self) -> None:
        """One remedy was confirmed against the command as it is already."""
        self._bench.reserve()
        if self.kept == BASELINE:
            return
        self.final = self._direct_test(self.kept)
        if self.final is None:
            self.final = PairTest(base=BASELINE, challenger=self.kept)
            self._run_pairs(self.final, FALSE_KEEPS)
            if not self.final.kept:
                self._fall_back()

    def _direct_test(self, configuration: Configuration) -> PairTest | None:
        """One that beat the command as it is."""
        return next(
            (
                test
                for test in self.tests
                if test.kept and test.base == BASELINE and test.challenger == configuration
            ),
            None,
        )

    def _fall_back(self) -> None:
        """The combination does not beat the command as it is: keep what did."""
        first = next((test for test in self.tests if test.kept and test.base == BASELINE), None)
        self.final = first
        self.kept = first.challenger if first is not None else BASELINE

    # Questions.

    def _with(self, contender: Contender) -> Configuration:
        """What is kept, with this one added, or in the place of its family's member."""
        rival = self._rival(contender)
        rest = [name for name in self.kept if rival is None or name != rival.name]
        return in_declared_order({*rest, contender.name})

    def _rival(self, contender: Contender) -> Contender | None:
        """The member of its family that is kept."""
        kept = (self._by_name[name] for name in self.kept if name != contender.name)
        return next((one for one in kept if one.chosen.family == contender.chosen.family), None)

    def _may_beat(self, contender: Contender, rival: Contender, challenger: Configuration) -> bool:
        """By as much as is worth a change, at the upper end of what is likely."""
        if challenger in self.rescreened:  # what it did alone no longer counts
            return self.rescreened[challenger].screening.promising
        return contender.screening is None or contender.screening.gain.high >= rival.gain + WORTH

    def _members(self, configuration: Configuration) -> list[ChosenFix]:
        return [self._by_name[name].chosen for name in configuration]

    def _is_kept(self, trial: TrialRun) -> bool:
        return trial.remedies == self.kept and trial.counts

    def _why_out(
        self, trial: TrialRun, members: Sequence[ChosenFix]
    ) -> tuple[str | None, CheckedTrial | None]:
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
        doing, self.doing = self.doing, "what chance does to the losses"
        runs = self._controls.runs.setdefault(kind, [])
        try:
            for number in (1, 2):
                trial = self._bench.run((f"{kind}{':' if '=' in kind else '='}{number}",))
                if trial.counts and not trial.unapplied:
                    runs.append(trial)
        except OutOfTimeError:
            pass
        self.doing = doing

    def _timed_trials(self) -> list[TimedTrial]:
        return [_timed(trial) for trial in self._bench.trials if trial.counts]

    def folders_of(self, configuration: Configuration) -> list[str]:
        """Of its trials that count, in order."""
        return [
            trial.folder
            for trial in self._bench.trials
            if trial.remedies == configuration and trial.counts
        ]

    def was_tried(self, name: str) -> bool:
        """Alone or with others."""
        return any(name in trial.remedies for trial in self._bench.trials)

    def tests_of(self, contender: Contender) -> list[PairTest]:
        """Those that put it to the test, alone or on top of others."""
        name = contender.name
        return [one for one in self.tests if name in one.challenger and name not in one.base]

    def rival_of(self, contender: Contender) -> Contender | None:
        """The member of its family that is kept instead of it."""
        return self._rival(contender)

    def not_tried(self) -> list[tuple[str, str]]:
        """Remedies that there was no time for."""
        why = _NO_TIME if self.done else _STOPPED
        return [(one.name, why) for one in self.contenders if not self.was_tried(one.name)]


def in_declared_order(names: Iterable[str]) -> Configuration:
    """One set of remedies has one name, in whatever order they were kept."""
    declared = list(FIXES)

    def place(name: str) -> tuple[int, str]:
        remedy = name.partition("=")[0]
        return (declared.index(remedy) if remedy in declared else len(declared)), name

    return tuple(sorted(names, key=place))


def _pairs(base: Configuration, challenger: Configuration) -> list[Configuration]:
    """The fewest runs that can be sure."""
    return [base, challenger] * FEWEST_PAIRS


def _middle(trial: TrialRun) -> float:
    return float(np.median(trial.step_ms))


def _timed(trial: TrialRun) -> TimedTrial:
    return TimedTrial(
        remedies=trial.remedies, number=trial.number, steps_ms=tuple(trial.step_ms.tolist())
    )


def _words(configuration: Configuration) -> str:
    return " + ".join(configuration) or "the command as it is"
