"""One trial: the user's command with some remedies applied, for a few dozen steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.errors import NotCapturedError, StepscopeError
from stepscope.measure.settings import Settings
from stepscope.measure.trial import ENOUGH
from stepscope.records.figures import long_duration
from stepscope.records.words import counted
from stepscope.trace.rank_facts import read_facts
from stepscope.trace.script_file import read_script
from stepscope.ui.captured_command import NEVER, capture_to_end
from stepscope.ui.command_to_end import last_lines
from stepscope.verify.runs import find_runs
from stepscope.verify.trial_file import read_trial
from stepscope.verify.trial_rules import why_unfinished
from stepscope.verify.trial_steps import FEWEST_STEPS, steady_steps

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from stepscope.records.script_facts import ScriptFacts
    from stepscope.ui.command_to_end import CommandEnd
    from stepscope.ui.tune.journal import FinishedTrial
    from stepscope.verify.trial_file import RankTrial

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
