"""Tune from the first run to the answer: capture, plan, predictions as promises, search, and
the track record.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from msgspec import to_builtins
from msgspec.structs import replace

import stepscope
from stepscope.changes import PREDICTED
from stepscope.changes.change import Effect
from stepscope.errors import NotCapturedError, StepscopeError, UsageError
from stepscope.fix.named_changes import ChosenChange, choose
from stepscope.measure import folder as layout
from stepscope.measure.profiler.schedule import Schedule
from stepscope.measure.settings import Settings
from stepscope.predict.engine import Bench
from stepscope.predict.whatifs import settings_for_remedy
from stepscope.records.change_values import PRECISIONS
from stepscope.records.comparison import TuneResult
from stepscope.records.prediction import Prediction, Setting, TrackedPromise
from stepscope.records.script_facts import ScriptFacts
from stepscope.text.words import counted
from stepscope.trace.run_folder.rank_facts import read_facts
from stepscope.trace.run_folder.related_runs import BASELINE, TRIALS, TUNE
from stepscope.ui.advice import open_slowest
from stepscope.ui.jobs.capture import capture_to_end
from stepscope.ui.jobs.process import OUTPUT, last_lines, raising_on_signals
from stepscope.ui.probe import probe_run
from stepscope.ui.topics.whatif import adjusted, judge
from stepscope.ui.tried_remedies import applicable
from stepscope.ui.tune.contenders import FEWEST_TOGETHER, Contender, TrialRules
from stepscope.ui.tune.plan import (
    Journal,
    PlannedCombination,
    PlannedRemedy,
    TunePlan,
    TuneStart,
    WantedRemedies,
    fitting_remedies,
    in_order,
)
from stepscope.ui.tune.result import progress_words, tune_result
from stepscope.ui.tune.search import ANOTHER_STEP, Search
from stepscope.ui.tune.trials import TrialBench, TrialCommand, TrialLength, all_reached
from stepscope.verify.answered_predictions import deliver, examine
from stepscope.verify.compare import compare
from stepscope.verify.steady import FEWEST_STEPS
from stepscope.verify.track_record import history, make_promise, open_promises, remember
from stepscope.verify.traits import describe_trace
from stepscope.verify.trials import read_script
from stepscope.verify.tuned_gain import WORTH

PATCH = "tune.patch"
_LAST_LINES = 8
_PROBE_S, _PROBE_PART = 20.0, 0.1  # at most, and of the budget
# Of one trial: these seconds, and times the baseline; but no more than this part of the budget.
_LEAST_LIMIT_S, _LIMIT_TIMES, _LIMIT_PART = 60.0, 10.0, 0.3


class TrialProgress(Protocol):
    """Shows what is going on: `news` stays, what is being tried is replaced by the next trial."""

    def news(self, words: str) -> None: ...

    def trying(self, words: str) -> None: ...


class _NoProgress:
    def news(self, words: str) -> None:
        del words

    trying = news


@dataclass(frozen=True, slots=True)
class TuneEnd:
    """The answer, and the process's exit code."""

    result: TuneResult
    code: int
    facts: ScriptFacts | None


def begin(start: TuneStart, folder: Path) -> Journal:
    """In a new folder; OSError if it cannot be written."""
    known = replace(start, stepscope=stepscope.__version__, started_unix=time.time())
    return Journal.create(folder, known)


def tune(journal: Journal, progress: TrialProgress | None = None) -> TuneEnd:
    """Go on from wherever the journal is. Ctrl-C and SIGTERM end it with what is known."""
    return _Tune(journal, progress or _NoProgress()).run()


class _Tune:
    def __init__(self, journal: Journal, progress: TrialProgress) -> None:
        self._journal, self._start, self._progress = journal, journal.start, progress
        self._folder = journal.folder
        self._search: Search | None = None
        self._bench: TrialBench | None = None

    def run(self) -> TuneEnd:
        code = 0
        ending = (signal.SIGTERM, signal.SIGHUP)
        try:
            with raising_on_signals(ending, lambda number: SystemExit(128 + number)):
                plan = self._journal.plan or self._make_plan()
                self._search = self._prepare(plan)
                self._search.run()
        except KeyboardInterrupt:
            code = 130
        except SystemExit as stop:  # a signal
            code = stop.code if isinstance(stop.code, int) else 1
        return self._end(code)

    # The baseline, and what follows from it.

    def _make_plan(self) -> TunePlan:
        self._progress.trying("capturing the unchanged command, with a trace")
        began = time.monotonic()
        run = self._folder / BASELINE
        steps = self._capture(run)
        took_s = time.monotonic() - began
        facts = read_script(run / "rank-00000")
        if facts is None:
            raise NotCapturedError(
                f"{run} does not say what the script consists of, because its first rank did "
                f"not end normally. Its output is in {run / OUTPUT}"
            )
        start = self._start
        limited = start.memory_limit is not None
        wanted = WantedRemedies.parse(start.only, start.skip, start.allow, saves_memory=limited)
        fitting = fitting_remedies(facts, wanted)
        predictions = self._predict(run, fitting.candidates)
        if predictions.note:
            self._progress.news(predictions.note)
        plan = TunePlan(
            candidates=in_order(fitting.candidates, predictions.by_remedy, predictions.leading),
            left_out=fitting.left_out,
            late=tuple(map(str, fitting.late)),
            proposals=tuple(map(str, fitting.proposals)),
            baseline_ms=predictions.baseline_ms,
            took_s=time.monotonic() - began,
            limit_s=_limit_s(took_s, start.budget_s),
            least_steps=min(steps, start.steps),
            together=predictions.together,
        )
        self._journal.add(plan)
        return plan

    def _predict(self, run: Path, candidates: Sequence[ChosenChange]) -> RemedyPredictions:
        """The step's operators are timed in the precisions that may be tried, unless a combination
        is predicted to do so much that it is tried first in any case."""
        precisions = [name for name in PRECISIONS if name in set(map(str, candidates))]
        if precisions:
            first = predict_remedies(run, candidates, remembered=False)
            most_ms = ANOTHER_STEP * (first.baseline_ms or 0.0)
            if first.together is None or first.together.predicted_ms > most_ms:
                budget_s = min(_PROBE_S, _PROBE_PART * self._start.budget_s)
                if words := probe_run(run, precisions, budget_s, on_cpu=False):
                    self._progress.news(words)
        return predict_remedies(run, candidates)

    def _capture(self, run: Path) -> int:
        """How many steps the first rank had; NotCapturedError if that says nothing."""
        start = self._start
        settings = Settings(folder=str(run.absolute()), step_on=start.step_on, trial=True)
        needed = Schedule.plan(settings).memory_steps[-1] + 2
        settings = Settings(
            folder=settings.folder,
            step_on=start.step_on,
            trial=True,
            stop_after=max(start.steps, needed),
        )
        end, ranks = capture_to_end(start.command, run, settings, enough=lambda: all_reached(run))
        steps = max((rank.get("steps") or 0 for rank in ranks), default=0)
        if end.code and not all_reached(run):
            why = f"ended with exit code {end.code} after {counted(steps, 'step')}"
        elif not ranks or not steps:
            why = (
                "had no training step. If it trains without a torch optimizer, try --step-on "
                "dataloader (or forward)"
            )
        elif steps < FEWEST_STEPS:
            why = f"has {counted(steps, 'step')}, but {FEWEST_STEPS} are needed to compare two runs"
        else:
            return int(steps)
        raise NotCapturedError(
            f"the command {why}, so nothing can be tuned. Its output is in {run / OUTPUT}",
            *last_lines(run, _LAST_LINES),
        )

    def _prepare(self, plan: TunePlan) -> Search:
        start = self._start
        runner = TrialCommand(
            command=start.command,
            home=self._folder / TRIALS,
            step_on=start.step_on,
            least_steps=plan.least_steps,
        )
        bench = TrialBench(
            runner,
            length=_length(start, plan),
            budget_s=start.budget_s,
            limit_s=plan.limit_s,
            spent_s=plan.took_s,
            journal=self._journal,
            announce=self._announce,
        )
        self._bench = bench
        rules = TrialRules(allow=Effect(start.allow), memory_limit=start.memory_limit)
        contenders = [Contender(planned=row, chosen=choose(row.remedy)) for row in plan.candidates]
        return Search(
            contenders,
            bench,
            rules,
            late=tuple(map(choose, plan.late)),
            together=plan.together.remedies if plan.together else (),
            captured_ms=plan.baseline_ms,
        )

    def _announce(self, number: int, remedies: tuple[str, ...]) -> None:
        if self._search is not None and self._bench is not None:
            words = progress_words(number, remedies, self._search, self._bench)
            self._progress.trying(words)

    # The answer.

    def _end(self, code: int) -> TuneEnd:
        plan = self._journal.plan
        status = "interrupted" if code else "finished"
        facts = read_script(self._folder / BASELINE / "rank-00000")
        if self._search is not None and plan is not None and not code:
            answer_promises(plan, self._search, self._folder / TRIALS)
        result = tune_result(self._journal, self._search, facts, status)
        layout.write_json(self._folder / TUNE, to_builtins(result))
        self._write_patch(result)
        return TuneEnd(result, code, facts)

    def _write_patch(self, result: TuneResult) -> None:
        """Beside tune.json, for `patch -p1` and `git apply`."""
        path = self._folder / PATCH
        if result.patch is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(result.patch.encode())


def _length(start: TuneStart, plan: TunePlan) -> TrialLength:
    predicted = {
        frozenset((row.remedy,)): row.predicted_ms for row in plan.candidates if row.predicted_ms
    }
    if plan.together is not None:
        predicted[frozenset(plan.together.remedies)] = plan.together.predicted_ms
    return TrialLength(asked=start.steps, baseline_ms=plan.baseline_ms, predicted_ms=predicted)


def _limit_s(took_s: float, budget_s: float) -> float:
    """A trial that goes on longer is ended: it would take the time of all others."""
    return max(
        _LEAST_LIMIT_S + took_s,
        min(_LEAST_LIMIT_S + _LIMIT_TIMES * took_s, _LIMIT_PART * budget_s),
    )


# What is predicted for each remedy before it is tried; each prediction becomes a promise.

_ASKS_LESS = {"fp16": "bf16"}  # which needs no scaler of gradients
_NEARLY = 1.05  # times the fastest: the same, as far as predictions tell
FAR_MORE = 0.85  # of the step that the best alone is predicted to reach: worth trying at once


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyPredictions:
    """By remedy, as it is written. `note` says why nothing could be predicted."""

    baseline_ms: float | None = None
    by_remedy: dict[str, PlannedRemedy] = field(default_factory=dict)
    together: PlannedCombination | None = None
    leading: tuple[str, ...] = ()  # remedies of the finding that leads
    note: str = ""


def predict_remedies(
    run: Path, candidates: Sequence[ChosenChange], *, remembered: bool = True
) -> RemedyPredictions:
    """Never raises: a remedy can be tried without a prediction. Those that are `remembered` are
    held against what their trials measure."""
    try:
        bench, rank, _ = open_slowest(str(run), cache=False)
        before = bench.predict([])
        past = history()
        planned = [
            _predict(bench, chosen, past, run if remembered else None) for chosen in candidates
        ]
        together = _fastest_together(bench, candidates, [row for row in planned if row])
    except Exception as error:
        if os.environ.get("STEPSCOPE_DEBUG") and not isinstance(error, StepscopeError):
            raise
        known = isinstance(error, StepscopeError)
        why = str(error) if known else f"a defect in stepscope: {type(error).__name__}: {error}"
        return RemedyPredictions(note=f"there is no prediction: {why}")
    return RemedyPredictions(
        baseline_ms=before.baseline_ms,
        by_remedy={row.remedy: row for row in planned if row is not None},
        together=together,
        leading=tuple(applicable(rank.findings[0])) if rank.findings else (),
    )


def _predictions(bench: Bench, chosen: ChosenChange) -> list[Prediction]:
    """Of the what-if that takes the remedy's value, or else of all that stand for the remedy."""
    name = chosen.id
    if chosen.value and name in PREDICTED and PREDICTED[name].takes_value:
        with contextlib.suppress(UsageError):  # it knows no such value
            return [bench.predict([Setting(name=name, value=chosen.value)])]
    return [bench.predict([setting]) for setting in settings_for_remedy(name)]


def _predict(
    bench: Bench, chosen: ChosenChange, past: Sequence[TrackedPromise], run: Path | None
) -> PlannedRemedy | None:
    """By the best of its what-ifs; None without any. It is a promise about the `run`."""
    predictions = [
        (adjusted(raw, past), raw) for raw in _predictions(bench, chosen) if not raw.refused
    ]
    if not predictions:
        return None
    after, raw = max(predictions, key=lambda pair: pair[0].throughput_factor)
    return PlannedRemedy(
        remedy=str(chosen),
        setting=after.settings[0],
        predicted_ms=after.predicted_ms,
        low_ms=after.low_ms,
        high_ms=after.high_ms,
        promise=_promise(bench, raw, run) if run is not None else None,
        hopeless=judge(after) != "faster",
    )


def _promise(bench: Bench, raw: Prediction, run: Path) -> str | None:
    """The model's own number; None where the track record cannot be written."""
    trace = bench.context.trace
    workload = describe_trace(trace, read_facts(Path(trace.path).parent))
    with contextlib.suppress(StepscopeError):
        return remember(make_promise(raw, workload, str(run.absolute()))).id
    return None


class _CombinationSearch:
    """The fastest combination that the what-ifs know, one member of a family: add what gains most,
    exchange members for their rivals, until nothing is predicted to gain any more."""

    def __init__(
        self, bench: Bench, settings: dict[str, Setting], families: dict[str, str]
    ) -> None:
        self._bench, self._settings, self._families = bench, settings, families
        self._known: dict[frozenset[str], Prediction] = {}
        self.members: tuple[str, ...] = ()

    def grow(self) -> None:
        while (better := min(self._next(), key=self.step_ms, default=self.members)) != self.members:
            if self.step_ms(better) > (1 - WORTH) * self.step_ms(self.members):
                return
            self.members = better

    def prefer_what_asks_less(self) -> None:
        """Where both do nearly the same."""
        for member, rival in _ASKS_LESS.items():
            if member in self.members and rival in self._families:
                exchanged = (*(name for name in self.members if name != member), rival)
                if self.step_ms(exchanged) <= _NEARLY * self.step_ms(self.members):
                    self.members = exchanged

    def predict(self, members: tuple[str, ...]) -> Prediction:
        key = frozenset(members)
        if key not in self._known:
            settings = dict.fromkeys(self._settings[name] for name in members)  # some share one
            self._known[key] = self._bench.predict(list(settings))
        return self._known[key]

    def step_ms(self, members: tuple[str, ...]) -> float:
        prediction = self.predict(members)
        return math.inf if prediction.refused else prediction.predicted_ms

    def _next(self) -> Iterator[tuple[str, ...]]:
        for name, family in self._families.items():
            if name not in self.members:
                rest = (one for one in self.members if self._families[one] != family)
                yield (*rest, name)


def _fastest_together(
    bench: Bench, candidates: Sequence[ChosenChange], planned: Sequence[PlannedRemedy]
) -> PlannedCombination | None:
    """None where the best alone is predicted to do nearly as much."""
    families = {str(chosen): chosen.family for chosen in candidates}
    settings = {row.remedy: row.setting for row in planned if row.setting is not None}
    search = _CombinationSearch(bench, settings, {name: families[name] for name in settings})
    search.grow()
    search.prefer_what_asks_less()
    members = tuple(sorted(search.members, key=lambda name: search.step_ms((name,))))
    alone_ms = min((search.step_ms((name,)) for name in settings), default=math.inf)
    if len(members) < FEWEST_TOGETHER or search.step_ms(members) > FAR_MORE * alone_ms:
        return None
    after = search.predict(members)
    return PlannedCombination(
        remedies=members,
        predicted_ms=after.predicted_ms,
        low_ms=after.low_ms,
        high_ms=after.high_ms,
    )


# Promises of single remedies meet their trials: the track record learns from every tune.


def answer_promises(plan: TunePlan, search: Search, trials: Path) -> None:
    """What cannot be answered stays open; the record is never a reason to fail."""
    wanted = {row.promise for row in plan.candidates if row.promise}
    with contextlib.suppress(StepscopeError):
        promises = {promise.id: promise for promise in open_promises() if promise.id in wanted}
        for contender in search.contenders:
            promise = promises.get(contender.planned.promise or "")
            if promise is None or contender.alone is None or not contender.alone.counts:
                continue
            if contender.alone.unapplied:
                continue
            comparison = compare(
                [str(trials / trial.folder) for trial in search.bases],
                [str(trials / folder) for folder in search.folders_of((contender.name,))],
                explain=False,
            )
            seen, why = examine(promise, comparison, named=True)
            if why is None:
                deliver(promise, comparison, (*seen, _deed(contender)), named=True)


def _deed(contender: Contender) -> str:
    assert contender.alone is not None
    return f"tune applied {contender.name}: {contender.alone.deeds.get(contender.name, '')}"
