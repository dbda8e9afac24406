"""One tune from its first run to its answer: capture, plan, search, record."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import stepscope
from stepscope.errors import NotCapturedError
from stepscope.fix.chosen import choose
from stepscope.fix.declaration import Effect
from stepscope.measure import folder as layout
from stepscope.measure.schedule import Schedule
from stepscope.measure.settings import Settings
from stepscope.records.probe_modes import PRECISIONS
from stepscope.records.words import counted
from stepscope.trace.script_file import read_script
from stepscope.trace.tune_files import BASELINE, TRIALS, TUNE
from stepscope.ui.captured_command import capture_to_end
from stepscope.ui.command_to_end import OUTPUT, last_lines
from stepscope.ui.job_process import raising_on_signals
from stepscope.ui.probe_run import probe_run
from stepscope.ui.tune.contenders import Contender
from stepscope.ui.tune.journal import Journal, TunePlan, TuneStart
from stepscope.ui.tune.plan import WantedRemedies, fitting_remedies, in_order
from stepscope.ui.tune.predictions import predict_remedies
from stepscope.ui.tune.result import tune_result
from stepscope.ui.tune.rules import TrialRules
from stepscope.ui.tune.search import Search
from stepscope.ui.tune.track import answer_promises
from stepscope.ui.tune.trial_bench import TrialBench
from stepscope.ui.tune.trial_length import TrialLength
from stepscope.ui.tune.trial_run import TrialCommand, all_reached
from stepscope.ui.tune.words import progress_words
from stepscope.verify.trial_steps import FEWEST_STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.fix.chosen import ChosenFix
    from stepscope.records.script_facts import ScriptFacts
    from stepscope.records.tuning import TuneResult

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

    def trying(self, words: str) -> None:
        del words


@dataclass(frozen=True, slots=True)
class TuneEnd:
    """The answer, and the process's exit code."""

    result: TuneResult
    code: int
    facts: ScriptFacts | None


def begin(start: TuneStart, folder: Path) -> Journal:
    """In a new folder; OSError if it cannot be written."""
    from msgspec.structs import replace

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
        self._probe(run, fitting.candidates)
        predictions = predict_remedies(run, fitting.candidates)
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

    def _probe(self, run: Path, candidates: Sequence[ChosenFix]) -> None:
        """Time the step's operators in the precisions that may be tried: their ranking rests on
        it."""
        precisions = [name for name in PRECISIONS if name in set(map(str, candidates))]
        budget_s = min(_PROBE_S, _PROBE_PART * self._start.budget_s)
        words = probe_run(run, precisions, budget_s, on_cpu=False) if precisions else ""
        if words:
            self._progress.news(words)

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
        layout.write_json(self._folder / TUNE, _builtins(result))
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


def _builtins(result: TuneResult) -> dict[str, object]:
    import msgspec

    content: dict[str, object] = msgspec.to_builtins(result)
    return content
