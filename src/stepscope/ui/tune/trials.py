"""Run one trial, the user's command with some remedies for a few dozen steps, or take it
from the journal where it was finished before the tune was killed.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.errors import NotCapturedError, StepscopeError
from stepscope.measure.session.trial import ENOUGH
from stepscope.measure.settings import Settings
from stepscope.records.normal import median
from stepscope.records.script_facts import ScriptFacts
from stepscope.text.figures import long_duration
from stepscope.text.words import counted
from stepscope.trace.run_folder.rank_facts import read_facts
from stepscope.ui.jobs.capture import NEVER, capture_to_end
from stepscope.ui.jobs.process import CommandEnd, last_lines
from stepscope.ui.tune.plan import FinishedTrial, Journal
from stepscope.verify.runs import find_runs
from stepscope.verify.steady import FEWEST_STEPS, steady_steps
from stepscope.verify.trials import RankTrial, read_script, read_trial, why_unfinished

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_LAST_LINES = 8
_MOST_NAME = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRun:
    """One start of the command, as the search sees it."""

    number: int
    remedies: tuple[str, ...]  # empty: the command as it is
    folder: str
    took_s: float
    failed: str | None = None  # why it does not count
    was_ended: bool = False  # because it took too long
    output: tuple[str, ...] = ()  # the last lines of a trial that failed
    step_ms: Floats = field(default_factory=lambda: np.empty(0))  # steady ones, in order
    ranks: dict[int, RankTrial] = field(default_factory=dict)  # losses and peak of each
    unapplied: dict[str, str] = field(default_factory=dict)  # remedy -> why nothing was changed
    deeds: dict[str, str] = field(default_factory=dict)  # remedy -> what it did
    facts: ScriptFacts | None = None  # the first rank's script, as it is with the remedies

    @property
    def mean_ms(self) -> float:
        return float(self.step_ms.mean())

    @property
    def median_ms(self) -> float:
        return median(self.step_ms)

    @property
    def counts(self) -> bool:
        return self.failed is None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCommand:
    """What all trials of one tune share."""

    command: tuple[str, ...]
    home: Path  # of the trials' folders
    step_on: str
    least_steps: int  # of a command that ends by itself

    def run(self, number: int, remedies: Sequence[str], *, steps: int, limit_s: float) -> TrialRun:
        """A trial that fails is an answer too; only a command that cannot be started raises."""
        folder = self.home / folder_name(number, remedies)
        settings = Settings(
            folder=str(folder.absolute()),
            wait=NEVER,
            memory=False,
            sample_hz=0.0,
            step_on=self.step_on,
            remedies=tuple(remedies),
            trial=True,
            stop_after=steps,
        )
        began = time.monotonic()
        end, ranks = capture_to_end(
            self.command,
            folder,
            settings,
            limit_s=limit_s,
            enough=lambda: all_reached(folder),
        )
        was_ended = end.too_long and not all_reached(folder)
        failed = (
            f"it was stopped after {long_duration(limit_s * 1e9)}"
            if was_ended
            else self._why_failed(folder, end, ranks, steps)
        )
        output = tuple(last_lines(folder, _LAST_LINES)) if failed else ()
        return read_run(
            folder,
            number=number,
            remedies=remedies,
            took_s=time.monotonic() - began,
            failed=failed,
            was_ended=was_ended,
            output=output,
        )

    def read(self, finished: FinishedTrial) -> TrialRun:
        """One that ended before the tune was resumed."""
        return read_run(
            self.home / finished.folder,
            number=finished.number,
            remedies=finished.remedies,
            took_s=finished.took_s,
            failed=finished.failed,
            output=finished.output,
        )

    def _why_failed(
        self, folder: Path, end: CommandEnd, ranks: list[dict[str, Any]], steps: int
    ) -> str | None:
        if all_reached(folder):
            return None
        return why_unfinished(
            {rank["rank"] or 0: rank.get("steps") or 0 for rank in ranks},
            ranks=max((rank["world_size"] or 1 for rank in ranks), default=1),
            wanted=steps,
            exit_code=end.code,
            baseline_steps=self.least_steps,
        )


def folder_name(number: int, remedies: Sequence[str]) -> str:
    """0007-bf16+fused-optimizer."""
    words = "+".join(remedies) or "baseline"
    safe = "".join(char if char.isalnum() or char in "+-=._" else "_" for char in words)
    return f"{number:04d}-{safe[:_MOST_NAME]}"


def all_reached(folder: Path) -> bool:
    """Every rank has seen as many steps as it was asked for."""
    reached = list(folder.glob(f"rank-*/{ENOUGH}"))
    if not reached:
        return False
    return len(reached) >= (read_facts(reached[0].parent).get("world_size") or 1)


def read_run(
    folder: Path,
    *,
    number: int,
    remedies: Sequence[str],
    took_s: float,
    failed: str | None,
    was_ended: bool = False,
    output: tuple[str, ...] = (),
) -> TrialRun:
    """From the files of a trial that has ended."""
    known: dict[str, Any] = {
        "number": number,
        "remedies": tuple(remedies),
        "folder": folder.name,
        "took_s": took_s,
    }
    if failed is None:
        try:
            steps = _measured_steps(folder)
        except StepscopeError as error:
            failed = str(error)
    if failed is not None:
        return TrialRun(**known, failed=failed, was_ended=was_ended, output=output)
    places = sorted(place for place in folder.glob("rank-*") if "." not in place.name)
    told = [read_facts(place).get("remedies") or [] for place in places]
    return TrialRun(
        **known,
        step_ms=steps,
        ranks=read_trial(folder),
        unapplied=_unapplied(remedies, told),
        deeds=_deeds(told),
        facts=read_script(places[0]) if places else None,
    )


def _measured_steps(folder: Path) -> Floats:
    """Of the slowest rank, after the warm-up; NotCapturedError if there are too few."""
    run = find_runs(str(folder))[0]
    steps = steady_steps(run.step_ms)
    if len(steps) < FEWEST_STEPS:
        raise NotCapturedError(
            f"only {counted(len(steps), 'step')} were measured, but {FEWEST_STEPS} are needed"
        )
    return steps


def _unapplied(
    remedies: Sequence[str], by_rank: Sequence[Sequence[dict[str, Any]]]
) -> dict[str, str]:
    """Remedies that no rank applied, and why."""
    told = [entry for entries in by_rank for entry in entries]
    reasons: dict[str, str] = {}
    for remedy in remedies:
        about = [entry for entry in told if entry["id"] == remedy]
        if not about:
            reasons[remedy] = "no rank reports whether it was applied"
        elif refused := next((entry["refused"] for entry in about if entry["refused"]), None):
            reasons[remedy] = refused
        elif not any(entry["did"] for entry in about):
            reasons[remedy] = "it found nothing to change"
    return reasons


def _deeds(by_rank: Sequence[Sequence[dict[str, Any]]]) -> dict[str, str]:
    """What the first rank that tells says about each remedy."""
    deeds: dict[str, str] = {}
    for entry in (entry for entries in by_rank for entry in entries):
        if entry["did"]:
            deeds.setdefault(entry["id"], "; ".join(entry["did"]))
    return deeds


# Where the search gets its trials from: run now, or finished before the tune was killed.
#
# The search asks for the same trials in the same order whenever their results are the same, and its
# time is the time that trials took, not that of the clock. So a tune that is resumed decides as one
# that was never killed.

_LATER_S = 20.0  # that a trial may go on past the budget, if it takes longer than expected


class OutOfTimeError(Exception):
    """The budget has no room for another trial."""


class TrialBench:
    """Gives the search one trial at a time, as long as the budget lasts."""

    def __init__(
        self,
        runner: TrialCommand,
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


# How many steps a trial makes: as many as were asked for, and more where steps are short.
#
# Thirty steps of 20 ms last less than a second, as long as a single hiccup of the host. Starting
# the command takes far longer than the steps that are added here.

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
        same = [trial.median_ms for trial in ran if frozenset(trial.remedies) == wanted]
        return same[-1] if same else min(self._guesses(wanted, ran), default=None)

    def _guesses(self, wanted: frozenset[str], ran: Sequence[TrialRun]) -> Iterator[float]:
        if wanted in self.predicted_ms:
            yield self.predicted_ms[wanted]
        yield from (trial.median_ms for trial in ran if frozenset(trial.remedies) < wanted)
