"""Decide what to try next and what to keep: a combination that promises much, or each
candidate alone, compared in fresh pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stepscope.changes import APPLIED
from stepscope.errors import NotCapturedError
from stepscope.fix.named_changes import ChosenChange
from stepscope.ui.tune.contenders import (
    BASELINE,
    FEWEST_TOGETHER,
    CheckedTrial,
    Configuration,
    Contender,
    Controls,
    PairTest,
    Rescreened,
    TrialRules,
)
from stepscope.ui.tune.plan import PlannedRemedy
from stepscope.ui.tune.trials import OutOfTimeError, TrialBench, TrialRun
from stepscope.verify.tuned_gain import (
    FEWEST_PAIRS,
    MUCH,
    PAIRED,
    WORTH,
    Gain,
    GainVerdict,
    Screening,
    TimedTrial,
    judge,
    level_of_next_test,
    screen,
    settle,
)

# 1. The command runs as it is, twice. If several remedies together are predicted to do far more
# than
#    the best alone, they run together. Once they are surely faster, each must earn its place: what
#    is as fast without it loses it. Then everything else is tried once on top, rivals last.
# 2. Otherwise each candidate runs once, with a run of the command as it is after every third. What
#    crashes, changes nothing, breaks parity or needs too much memory is out.
# 3. The promising ones are confirmed, best first, in fresh pairs of runs, unless their gain is many
#    times what starts differ by: then it is settled. What is kept joins the base, and the next one
#    has to beat that. Of a family only one is kept; a better member replaces it.
# 4. What did not help alone is tried once more on top of what was kept; what was clearly worse
#    alone too, once the step is less than half of what it was.
# 5. The whole combination is confirmed against the command as it is. Where the budget ends before,
#    what the runs so far settle is kept.
#
# verify.tuned_gain decides what is promising and what is sure.

_BETWEEN_BASES = 3  # candidates that run between two runs of the base
_BASES_TO_SETTLE = 3  # starts of the base: two may be slow by chance, on a machine that others use
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
        late: Sequence[ChosenChange] = (),
        together: Configuration = BASELINE,
        captured_ms: float | None = None,
    ) -> None:
        """`late` are remedies that may fit once another one is kept, `together` those that are
        predicted to do far more together than alone, the one that gives most first. `captured_ms`
        is the step of one more start of the command as it is."""
        self.contenders = list(contenders)
        self._late, self._together = list(late), together
        self._by_name = {contender.name: contender for contender in contenders}
        self._bench, self._runs = bench, PairRuns(bench, rules)
        self._captured_ms = captured_ms
        self.tests: list[PairTest] = []
        self._expected = 0  # tests that the tune is likely to make
        self.rescreened: dict[Configuration, Rescreened] = {}  # by the whole configuration
        self.kept: Configuration = BASELINE
        self.final: PairTest | None = None
        self.doing = "the unchanged command"
        self.leapt = False  # the combination that was predicted was kept
        self.done = False
        self.out_of_time = False

    @property
    def bases(self) -> list[TrialRun]:
        """Runs of the command as it is."""
        return self._runs.bases

    def run(self) -> None:
        """Until everything is decided or the budget is spent."""
        parts = (
            self._measure_bases,
            self._leap,
            self._screen_and_combine,
            self._confirm_combination,
        )
        for part in parts:
            try:
                part()
            except OutOfTimeError:
                self.out_of_time = True
        if self.kept == BASELINE:
            self._keep_what_is_settled()
        self.out_of_time |= bool(self.not_tried())
        self.done = True

    def _measure_bases(self) -> None:
        """Two, so that chance is known: how starts differ, and whether losses repeat."""
        for _ in range(2):
            self._runs.run_base()

    # 1. Much at once.

    def _leap(self) -> None:
        """What is surely faster is kept; a member that it does as well without is dropped."""
        if len(self._together) < FEWEST_TOGETHER:
            return
        together = in_declared_order(self._together)
        self.doing = "predicted to be fastest together"
        trial = self._bench.run(together)
        test = PairTest(base=BASELINE, challenger=together)
        why, test.checked = self._runs.why_out(trial, self._members(together))
        if why is not None:
            test.why = why
            self.tests.append(test)
            return
        screening = self._runs.screen(trial, self.bases)
        self.rescreened[together] = Rescreened(BASELINE, screening, test.checked)
        if screening.promising:
            self._expected = 1 + len(together)
            self.leapt = self._decide(test)
        if self.leapt:
            for name in reversed(self._together):
                self._must_earn_its_place(self._by_name[name])

    def _must_earn_its_place(self, member: Contender) -> None:
        """The rest runs once without it; unless that is clearly slower, fresh pairs decide. Where
        starts differ too much to tell, what is confirmed stays as it is."""
        rest = in_declared_order(name for name in self.kept if name != member.name)
        if rest == BASELINE:
            return
        self.doing = f"without {member.name}"
        with_it = [trial for trial in self._bench.trials if self._is_kept(trial)]
        trial = self._bench.run(rest)
        why, checked = self._runs.why_out(trial, self._members(rest))
        if why is not None:
            return
        without = self._runs.screen(trial, with_it)
        self.rescreened[rest] = Rescreened(self.kept, without, checked)
        if without.gain.high < -WORTH:
            return
        test = PairTest(base=rest, challenger=self.kept, is_for=member.name)
        if not self._decide(test) and not test.is_unsure:
            member.tested_on.add(rest)
            self.kept = rest
            self._reserve_confirmation()

    def _decide(self, test: PairTest) -> bool:
        """By the runs that there are, or in fresh pairs at this tune's next level; what is kept is
        the base from now on."""
        self.tests.append(test)
        if not self._settle(test):
            outcomes = [earlier.kept for earlier in self.tests[:-1] if earlier.pairs]
            self._run_pairs(test, level_of_next_test(outcomes, self._expected))
        if test.kept:
            self.kept = test.challenger
            self._reserve_confirmation()
        return test.kept

    def _settle(self, test: PairTest) -> bool:
        """Where its gain is many times what starts differ by."""
        verdict = self._verdict_of_runs(test.base, test.challenger)
        if verdict is None:
            return False
        test.verdict, test.kept, test.why = verdict, True, verdict.why
        test.checked = test.checked or self._checked(test.challenger)
        return True

    def _verdict_of_runs(self, base: Configuration, tried: Configuration) -> GainVerdict | None:
        """None: they settle nothing."""
        ran = [trial for trial in self._bench.trials if trial.counts]
        of_tried = [trial for trial in ran if trial.remedies == tried]
        of_base = [trial for trial in ran if trial.remedies == base]
        if len(of_base) + (base == BASELINE and self._captured_ms is not None) < _BASES_TO_SETTLE:
            return None
        if base == BASELINE and of_tried and self._captured_ms is not None:
            slowest = max(trial.median_ms for trial in of_tried)
            if slowest > (1 - MUCH) * self._captured_ms:
                return None
        order = list(
            dict.fromkeys(trial.remedies for trial in self._bench.trials if trial.remedies)
        )
        return settle(
            list(map(_timed, of_tried)),
            list(map(_timed, of_base)),
            list(map(_timed, ran)),
            number=order.index(tried) if tried in order else len(order),
            expected=len(self.contenders) + 1,
        )

    def _checked(self, configuration: Configuration) -> CheckedTrial | None:
        """What the losses of its single run show."""
        if configuration in self.rescreened:
            return self.rescreened[configuration].checked
        alone = self._by_name[configuration[0]] if len(configuration) == 1 else None
        return alone.checked if alone is not None else None

    def _run_pairs(self, test: PairTest, level: float) -> None:
        for number in self._runs.pairs_of(test, self._members(test.challenger), level):
            self.doing = f"{_words(test.challenger)}, pair {number}"

    def _screen_and_combine(self) -> None:
        """What there was no time to screen at first is screened if confirming took less."""
        if self.leapt:
            self._combine(self._worth_another_try())
            return
        while screened := self._screen_all():
            promising = [contender for contender in screened if contender.is_promising]
            self._expected = self._expected or max(1, len(promising))  # it must not change later
            self._combine(sorted(promising, key=lambda contender: -contender.gain))

    # 2. Each alone.

    def _screen_all(self) -> list[Contender]:
        """Those that ran just now. What is predicted not to help comes last, and not in the time
        that confirming needs."""
        first = not any(contender.alone for contender in self.contenders)
        pairs = _pairs(BASELINE, BASELINE)
        self._bench.reserve(*pairs)
        # A budget without room to confirm anything may still settle something.
        can_confirm = self._bench.affords(BASELINE)
        self._bench.reserve(*pairs * (_CONFIRMED if first else 1) if can_confirm else ())
        screened: list[Contender] = []
        try:
            self._screen_in_turn(screened, first=first)
        finally:  # also when tune is stopped meanwhile: what ran is known
            self._compare_screened(screened)
        return screened

    def _screen_in_turn(self, screened: list[Contender], *, first: bool) -> None:
        since_base = 0
        for number, contender in enumerate(self.contenders, 1):
            if contender.alone is not None or self._ran_on_top(contender):
                continue
            if first and contender.planned.hopeless and not self._bench.affords_half():
                continue
            self.doing = f"{number} of {len(self.contenders)} alone"
            try:
                contender.alone = trial = self._bench.run((contender.name,))
                screened.append(contender)
                contender.out, contender.checked = self._runs.why_out(trial, [contender.chosen])
                since_base += 1
                if since_base == _BETWEEN_BASES:
                    since_base = 0
                    self._runs.run_base()
            except OutOfTimeError:
                break
        self._reserve_confirmation()
        if since_base and self._bench.affords(BASELINE):
            self._runs.run_base()

    def _compare_screened(self, screened: Sequence[Contender]) -> None:
        """Only now: a run of the base after a candidate counts as well as the one before."""
        for contender in screened:
            if contender.alone is not None and contender.alone.counts:
                contender.screening = self._runs.screen(contender.alone, self.bases)

    # 3. and 4. The winners together.

    def _combine(self, promising: Sequence[Contender]) -> None:
        waiting = list(promising)
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
        rival = self.rival_of(contender)
        if rival is not None and not self._may_beat(contender, rival, challenger):
            return
        contender.tested_on.add(self.kept)
        self._decide(PairTest(base=self.kept, challenger=challenger))

    def _worth_another_try(self) -> list[Contender]:
        """On top of what is kept now: run once, and those that look promising are confirmed."""
        if self.kept == BASELINE:
            return []
        self._admit_late()
        again = [contender for contender in self.contenders if self._may_help_now(contender)]
        again.sort(key=lambda contender: self.rival_of(contender) is not None)
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
            why, checked = self._runs.why_out(trial, self._members(challenger))
            if why is not None:
                contender.tested_on.add(self.kept)
                continue
            screening = self._runs.screen(trial, base)
            self.rescreened[challenger] = Rescreened(self.kept, screening, checked)
            if screening.promising:
                promising.append((screening.gain.value, contender))
            elif self.leapt:
                contender.tested_on.add(self.kept)
        return [contender for _, contender in sorted(promising, key=lambda pair: -pair[0])]

    def _admit_late(self) -> None:
        """Those that wait for a family that is kept, and fit the training as it is now."""
        facts = next(trial.facts for trial in reversed(self._bench.trials) if self._is_kept(trial))
        families = {member.family for member in self._members(self.kept)}
        for chosen in list(self._late):
            if not chosen.application.after & families or facts is None:
                continue
            if chosen.fix.fits(facts, chosen.value) is None:
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
        if self.leapt and not self.was_tried(contender.name):
            return True
        if self.rival_of(contender) is not None or contender.tested_on:
            return False
        return contender.is_open or self._is_another_step()

    def _is_another_step(self) -> bool:
        """What is kept leaves so little of the step that something else limits it, and what a
        remedy did to the whole no longer tells."""
        kept = [trial.median_ms for trial in self._bench.trials if self._is_kept(trial)]
        return min(kept) < ANOTHER_STEP * min(trial.median_ms for trial in self.bases)

    def _is_new_beside_its_families(self, contender: Contender) -> bool:
        """It never ran together with a kept member of the families it is tried again after."""
        after = contender.chosen.application.after
        waited_for = [one for one in self._members(self.kept) if one.family in after]
        return any(
            not any({contender.name, str(one)} <= set(run.remedies) for run in self._bench.trials)
            for one in waited_for
        )

    # 5. The answer.

    def _reserve_confirmation(self) -> None:
        """Time to confirm what is kept against the command as it is."""
        is_confirmed = self.kept == BASELINE or self._direct_test(self.kept) is not None
        self._bench.reserve(*() if is_confirmed else _pairs(BASELINE, self.kept))

    def _confirm_combination(self) -> None:
        """One remedy was confirmed against the command as it is already."""
        self._bench.reserve()
        if self.kept == BASELINE:
            return
        self.final = self._direct_test(self.kept)
        if self.final is not None:
            return
        self.final = PairTest(base=BASELINE, challenger=self.kept)
        if self._settle(self.final):
            return
        try:
            self._run_pairs(self.final, PAIRED)
        except OutOfTimeError:
            self.out_of_time = True
            if self.leapt:  # parts of a combination were never measured against the command
                self._fall_back()
            return
        if not self.final.kept:
            self._fall_back()

    def _direct_test(self, configuration: Configuration) -> PairTest | None:
        """The test that it won against the command as it is."""
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

    def leading(self) -> tuple[Configuration, Gain] | None:
        """What did best against the command as it is in what ran so far, and may be kept: its
        gain is not sure yet unless it is kept."""
        seen: dict[Configuration, Gain] = {}
        for contender in self.contenders:
            if contender.is_promising and contender.screening is not None:
                seen[contender.name,] = contender.screening.gain
        for tried, once in self.rescreened.items():
            allowed = once.checked is None or once.checked.why_out is None
            if once.base == BASELINE and once.screening.promising and allowed:
                seen[tried] = once.screening.gain
        for test in self.tests:
            if test.base == BASELINE and test.gain is not None:
                seen.pop(test.challenger, None)
                if test.verdict is not None and test.verdict.decision != "not kept":
                    seen[test.challenger] = test.gain
        return max(seen.items(), key=lambda item: item[1].value, default=None)

    def _keep_what_is_settled(self) -> None:
        """The budget ended before anything was confirmed."""
        leading = self.leading()
        if leading is None:
            return
        test = PairTest(base=BASELINE, challenger=leading[0])
        if self._settle(test):
            self.tests.append(test)
            self.kept, self.final = test.challenger, test

    # Questions.

    def _with(self, contender: Contender) -> Configuration:
        """What is kept, with this one added, or in the place of its family's member."""
        rival = self.rival_of(contender)
        rest = [name for name in self.kept if rival is None or name != rival.name]
        return in_declared_order({*rest, contender.name})

    def rival_of(self, contender: Contender) -> Contender | None:
        """The member of its family that is kept."""
        kept = (self._by_name[name] for name in self.kept if name != contender.name)
        return next((one for one in kept if one.chosen.family == contender.chosen.family), None)

    def _may_beat(self, contender: Contender, rival: Contender, challenger: Configuration) -> bool:
        """By as much as is worth a change, at the upper end of what is likely."""
        if challenger in self.rescreened:  # what it did alone no longer counts
            return self.rescreened[challenger].screening.promising
        return contender.screening is None or contender.screening.gain.high >= rival.gain + WORTH

    def _members(self, configuration: Configuration) -> list[ChosenChange]:
        return [self._by_name[name].chosen for name in configuration]

    def _is_kept(self, trial: TrialRun) -> bool:
        return trial.remedies == self.kept and trial.counts

    def folders_of(self, configuration: Configuration) -> list[str]:
        """Of its trials that count, in order."""
        return [
            trial.folder
            for trial in self._bench.trials
            if trial.remedies == configuration and trial.counts
        ]

    def _ran_on_top(self, contender: Contender) -> bool:
        """Of something that was kept; together with others that were not does not count."""
        return contender.name not in self._together and self.was_tried(contender.name)

    def was_tried(self, name: str) -> bool:
        """Alone or with others."""
        return any(name in trial.remedies for trial in self._bench.trials)

    def tests_of(self, contender: Contender) -> list[PairTest]:
        """Those that put it to the test, alone or on top of others."""
        name = contender.name
        return [one for one in self.tests if name in one.challenger and name not in one.base]

    def not_tried(self) -> list[tuple[str, str]]:
        """Remedies that there was no time for."""
        why = _NO_TIME if self.done else _STOPPED
        return [(one.name, why) for one in self.contenders if not self.was_tried(one.name)]


def in_declared_order(names: Iterable[str]) -> Configuration:
    """One set of remedies has one name, in whatever order they were kept."""
    declared = list(APPLIED)

    def place(name: str) -> tuple[int, str]:
        remedy = name.partition("=")[0]
        return (declared.index(remedy) if remedy in declared else len(declared)), name

    return tuple(sorted(names, key=place))


def _pairs(base: Configuration, challenger: Configuration) -> list[Configuration]:
    """The fewest runs that can be sure."""
    return [base, challenger] * FEWEST_PAIRS


def _words(configuration: Configuration) -> str:
    return " + ".join(configuration) or "the unchanged command"


# Trials that are checked and compared: one alone, or fresh pairs until they decide.


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

    def pairs_of(
        self, test: PairTest, members: Sequence[ChosenChange], level: float
    ) -> Iterator[int]:
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
        self, trial: TrialRun, members: Sequence[ChosenChange]
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
