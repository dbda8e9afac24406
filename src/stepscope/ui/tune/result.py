"""Write a search as tune.json has it, and in sentences: the baseline, every configuration,
what is kept and the patch.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.fix.named_changes import choose
from stepscope.records.comparison import (
    FAILED,
    NOT_KNOWN,
    RemedyLeftOut,
    TriedConfiguration,
    TuneResult,
)
from stepscope.records.script_facts import ScriptFacts
from stepscope.text.figures import (
    factor,
    interval,
    long_duration,
    longer_or_shorter,
    milliseconds,
    percent,
    relative_interval,
    significant,
    trimmed,
    unsigned_percent,
)
from stepscope.trace.run_folder.related_runs import TRIALS
from stepscope.ui.tune.contenders import (
    BASELINE,
    OUT_OF_TIME,
    CheckedTrial,
    Configuration,
    Contender,
    PairTest,
    control_words,
    peak_bytes,
)
from stepscope.ui.tune.patch import TunePatch, make_patch
from stepscope.ui.tune.plan import Journal, PlannedCombination, PlannedRemedy
from stepscope.verify.change import mean_step
from stepscope.verify.steady import without_pauses
from stepscope.verify.tuned_gain import WORTH, Gain, other_way_round

if TYPE_CHECKING:
    from stepscope.ui.tune.search import Search
    from stepscope.ui.tune.trials import TrialBench


def tune_result(
    journal: Journal, search: Search | None, facts: ScriptFacts | None, status: str
) -> TuneResult:
    """`search` is None if the tune was stopped before its first trial."""
    start, plan = journal.start, journal.plan
    known = TuneResult(
        command=start.command,
        folder=start.folder,
        status=status,
        left_out=tuple(
            RemedyLeftOut(remedy=row.remedy, why=row.why) for row in (plan.left_out if plan else ())
        ),
    )
    if search is None or not search.bases:
        return replace(known, verdict=verdict_words(known))
    result = _measured(known, search, start.memory_limit)
    if plan is not None and plan.together is not None:
        result = replace(result, trials=_with_prediction(result.trials, plan.together))
    if plan is not None and plan.baseline_ms and result.baseline_ms:
        factor = result.baseline_ms / plan.baseline_ms
        result = replace(result, trials=tuple(_promise_of(row, factor) for row in result.trials))
    if facts is not None and plan is not None:
        result = _with_patch(result, facts, plan.proposals)
    return replace(result, verdict=verdict_words(result))


def _promise_of(row: TriedConfiguration, factor: float) -> TriedConfiguration:
    """The predicted change of the step that was measured: the captured run's own step may be
    another one, with other stalls and other neighbours."""

    def scaled(ms: float | None) -> float | None:
        return None if ms is None else factor * ms

    return replace(
        row,
        predicted_ms=scaled(row.predicted_ms),
        predicted_low_ms=scaled(row.predicted_low_ms),
        predicted_high_ms=scaled(row.predicted_high_ms),
    )


def _with_prediction(
    rows: tuple[TriedConfiguration, ...], planned: PlannedCombination
) -> tuple[TriedConfiguration, ...]:
    """What was predicted for several remedies together stands in their row."""
    wanted = frozenset(planned.remedies)
    return tuple(
        _predicted(row, planned) if frozenset(row.remedies) == wanted else row for row in rows
    )


def _predicted(
    row: TriedConfiguration, planned: PlannedCombination | PlannedRemedy
) -> TriedConfiguration:
    return replace(
        row,
        predicted_ms=planned.predicted_ms,
        predicted_low_ms=planned.low_ms,
        predicted_high_ms=planned.high_ms,
    )


def _measured(known: TuneResult, search: Search, memory_limit: int | None) -> TuneResult:
    table = _Rows(search)
    runs = [without_pauses(trial.step_ms) for trial in search.bases]
    _, low, high = mean_step(runs)
    best = search.final.gain if search.final is not None and search.kept else None
    best_ms = table.estimate(search.kept)
    return replace(
        known,
        status="out of time" if search.out_of_time and known.status == "finished" else known.status,
        baseline_ms=table.baseline_ms,
        baseline_low_ms=low,
        baseline_high_ms=high,
        best_ms=best_ms,
        best_low_ms=table.baseline_ms * (1 - best.high) if best else None,
        best_high_ms=table.baseline_ms * (1 - best.low) if best else None,
        speedup=table.baseline_ms / best_ms,
        kept=search.kept,
        leading=_leading(search),
        trials=tuple(table.rows()),
        left_out=(
            *(row for row in known.left_out if not table.was_tried(row.remedy)),
            *(RemedyLeftOut(remedy=name, why=why) for name, why in search.not_tried()),
        ),
        control=control_words(search.bases, memory_limit),
        baseline_peak_bytes=peak_bytes(search.bases),
        starts_differ=_starts_differ(search),
    )


def _leading(search: Search) -> Configuration:
    """Only of a tune that ended before it was decided."""
    leading = search.leading()
    if search.kept or leading is None or (search.done and not search.out_of_time):
        return BASELINE
    return leading[0]


def _starts_differ(search: Search) -> float | None:
    """The most, in tests that stayed open because of it."""
    spreads = (test.verdict.starts_differ for test in search.tests if test.verdict is not None)
    return max((spread for spread in spreads if spread is not None), default=None)


class _Rows:
    """One row per configuration. A gain is measured against the base that it was tested on."""

    def __init__(self, search: Search) -> None:
        self._search = search
        logs = [math.log(float(without_pauses(t.step_ms).mean())) for t in search.bases]
        self.baseline_ms = math.exp(fmean(logs))

    def estimate(self, configuration: Configuration) -> float:
        """Its step, from the tests that led to it; the final test is the best one."""
        if configuration == BASELINE:
            return self.baseline_ms
        final = self._search.final
        if final is not None and final.challenger == configuration and final.gain is not None:
            return self.baseline_ms * (1 - final.gain.value)
        for test in self._search.tests:
            if test.challenger == configuration and test.gain is not None and test.kept:
                return self.estimate(test.base) * (1 - test.gain.value)
        return self.baseline_ms

    def was_tried(self, name: str) -> bool:
        """Late ones are left out at first."""
        return any(
            name in (contender.name, contender.chosen.id) and self._search.was_tried(contender.name)
            for contender in self._search.contenders
        )

    def rows(self) -> list[TriedConfiguration]:
        search = self._search
        rows = [self._alone(one) for one in search.contenders if one.alone is not None]
        tested = set()
        for test in search.tests:
            if len(test.challenger) > 1 and not test.is_for:
                tested.add(test.challenger)
                rows.append(self._tested(test))
        rows += [self._once(one) for one in search.rescreened if one not in tested]
        if search.final is not None and search.final not in search.tests:
            rows = [row for row in rows if row.remedies != search.final.challenger]
            rows.append(self._tested(search.final))
        return rows

    def _once(self, configuration: Configuration) -> TriedConfiguration:
        """One run, or the pairs that followed it where a member had to earn its place."""
        base, screening, checked = self._search.rescreened[configuration]
        gain, unsure = screening.gain, ""
        for test in self._search.tests:
            if test.is_for and test.base == configuration and test.gain is not None:
                gain = other_way_round(test.gain)
                unsure = f"; {test.why}: {test.is_for} stays" if test.is_unsure else ""
        on_top = "on top of" if set(base) < set(configuration) else "against"
        why = f"{gain_words(gain)} {on_top} {configuration_words(base)}{unsure}"
        return self._row(configuration, base, gain, why=why, checked=checked)

    def _alone(self, contender: Contender) -> TriedConfiguration:
        planned, test = contender.planned, self._direct_test(contender)
        gain = test.gain if test is not None and test.gain is not None else None
        if gain is None and contender.screening is not None:
            gain = contender.screening.gain
        kept = contender.name in self._search.kept
        row = self._row(
            (contender.name,),
            BASELINE,
            gain,
            why=self._why_alone(contender, gain, kept=kept),
            checked=contender.checked,
            kept=kept,
        )
        return _predicted(row, planned)

    def _why_alone(self, contender: Contender, gain: Gain | None, *, kept: bool) -> str:
        if contender.out is not None:
            return contender.out
        words = gain_words(gain) if gain is not None else ""
        tests = self._search.tests_of(contender)
        if kept:
            return words
        if tests:
            beside = f" beside {' + '.join(tests[-1].base)}" if tests[-1].base else ""
            return f"{tests[-1].why}{beside}"
        rival = self._search.rival_of(contender)
        if rival is not None and contender.is_promising:
            return f"{words}, not more than {rival.name}, which excludes it"
        return words

    def _direct_test(self, contender: Contender) -> PairTest | None:
        alone = (contender.name,)
        tests = [t for t in self._search.tests if t.base == BASELINE and t.challenger == alone]
        return next((test for test in tests if test.gain is not None), None)

    def _tested(self, test: PairTest) -> TriedConfiguration:
        """One that was cut short has the gain of its single run before, if there was one."""
        counts = test.kept or test is self._search.final
        kept = counts and set(test.challenger) <= set(self._search.kept)
        gain, once = test.gain, self._search.rescreened.get(test.challenger)
        if gain is None and once is not None and once.base == test.base:
            gain = once.screening.gain
        row = self._row(
            test.challenger, test.base, gain, why=test.why, checked=test.checked, kept=kept
        )
        was_cut_short = test.checked is None and test.why == OUT_OF_TIME  # its losses are unknown
        return replace(row, parity=NOT_KNOWN) if was_cut_short else row

    def _row(
        self,
        configuration: Configuration,
        base: Configuration,
        gain: Gain | None,
        *,
        why: str,
        checked: CheckedTrial | None = None,
        kept: bool = False,
    ) -> TriedConfiguration:
        base_ms = self.estimate(base)
        return TriedConfiguration(
            remedies=configuration,
            measured_ms=base_ms * (1 - gain.value) if gain else None,
            low_ms=base_ms * (1 - gain.high) if gain else None,
            high_ms=base_ms * (1 - gain.low) if gain else None,
            peak_bytes=checked.peak_bytes if checked else None,
            parity=checked.parity if checked else (NOT_KNOWN if gain else FAILED),
            parity_detail=checked.detail if checked else "",
            kept=kept,
            why=why,
            runs=tuple(f"{TRIALS}/{name}" for name in self._search.folders_of(configuration)),
        )


def _with_patch(result: TuneResult, facts: ScriptFacts, proposals: tuple[str, ...]) -> TuneResult:
    """Remedies that only a person can make are told beside the patch."""
    patch = patch_of(result, facts)
    root = Path(result.folder or ".")
    more = tuple(
        f"{name}: {line}"
        for name in proposals
        for line in make_patch(facts, [choose(name)], root).by_hand
    )
    return replace(
        result, patch=patch.diff, by_hand=(*patch.by_hand, *more), variables=patch.variables
    )


def patch_of(result: TuneResult, facts: ScriptFacts) -> TunePatch:
    """What does the same as the kept remedies."""
    return make_patch(facts, [choose(name) for name in result.kept], Path(result.folder or "."))


# A tune in sentences: progress while it runs, and its verdict.

AS_IT_IS = "the unchanged command"
STOPPED = "stopped before any change was kept"
NOT_YET = "the budget was spent before any change was clearly faster"
NOTHING = f"none of the tried changes gains {trimmed(percent(WORTH))} or more"

_NOTHING_TRIED = {
    "finished": "no change fits this training, so nothing was tried",
    "out of time": "the budget leaves no time to try a change and to confirm it",
}


def configuration_words(remedies: tuple[str, ...]) -> str:
    return " + ".join(remedies) or AS_IT_IS


def gain_words(gain: Gain) -> str:
    """Return 'saves 12.3% (11.0% to 13.5%)', '4.2% slower (+3.1% to +5.3%)', or how the step may
    change where the interval does not say which."""
    if gain.high < 0:
        ends = relative_interval(-gain.high, -gain.low)
        return f"{longer_or_shorter(-gain.value, longer='slower')} ({ends})"
    if gain.low < 0:
        ends = f"{_slower_or_shorter(gain.low)} to {_slower_or_shorter(gain.high)}"
        return f"may make the step {ends}"
    ends = f"{unsigned_percent(gain.low)} to {unsigned_percent(gain.high)}"
    return f"saves {unsigned_percent(gain.value)} ({ends})"


def _slower_or_shorter(share: float) -> str:
    """Return what a saved share does to the step."""
    if share < -1:
        return "over 100% slower"
    return f"{unsigned_percent(share)} {'slower' if share < 0 else 'shorter'}"


def progress_words(
    number: int, remedies: tuple[str, ...], search: Search, bench: TrialBench
) -> str:
    """What is being tried, how far it is, the best so far and the time left."""
    leading = search.leading()
    best = "no change kept yet"
    if search.kept:
        best = f"best so far: {configuration_words(search.kept)}"
    elif leading is not None:
        best = f"best so far, not sure yet: {configuration_words(leading[0])}"
    left = long_duration(bench.left_s * 1e9)
    tried = configuration_words(remedies)
    doing = f" ({search.doing})" if search.doing != tried else ""
    return f"trial {number}: {tried}{doing}; {best}; {left} of the budget left"


def verdict_words(result: TuneResult) -> str:
    if result.baseline_ms is None:
        what = "stopped" if result.status == "interrupted" else "the budget ended"
        return f"{what} before anything was measured"
    if not result.kept or result.best_ms is None or result.speedup is None:
        return _nothing_kept(result)
    names = configuration_words(result.kept)
    steps = f"{significant(result.baseline_ms)} -> {milliseconds(result.best_ms)}"
    if result.best_low_ms is not None and result.best_high_ms is not None:
        steps += f" ({interval(result.best_low_ms, result.best_high_ms)})"
    if result.speedup >= 1.5:
        return f"{names}: a step is {factor(result.speedup)} times faster, {steps}"
    return f"{names}: a step is {percent(1 - 1 / result.speedup)} shorter, {steps}"


def _leading_words(result: TuneResult) -> str:
    row = next((row for row in result.trials if row.remedies == result.leading), None)
    if row is None:
        return NOT_YET
    steps = f"{significant(result.baseline_ms or 0.0)} -> {milliseconds(row.measured_ms or 0.0)}"
    if row.low_ms is not None and row.high_ms is not None:
        steps += f" ({interval(row.low_ms, row.high_ms)})"
    ended = "tune was stopped" if result.status == "interrupted" else "the budget was spent"
    names = configuration_words(row.remedies)
    return f"{names} is probably faster, {steps}; {ended} before that was certain"


def _nothing_kept(result: TuneResult) -> str:
    """That nothing helps is said only where everything was tried and decided."""
    if result.leading:
        return _leading_words(result)
    if result.status == "interrupted":
        return STOPPED
    if not result.trials:
        return _NOTHING_TRIED.get(result.status, NOTHING)
    if result.starts_differ is not None:
        spread = percent(result.starts_differ)
        return f"none is clearly faster: starts of the same command differ by {spread}"
    return NOT_YET if result.status == "out of time" else NOTHING
