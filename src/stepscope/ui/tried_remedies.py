"""What a run was started with, what can be tried on it, and what a tune of its command has
found, in findings and in sentences.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.changes import APPLIED, CHANGES
from stepscope.records.comparison import FAILED, TriedRemedy, TuneResult, best_alone, by_result
from stepscope.text.figures import milliseconds, significant
from stepscope.text.words import counted
from stepscope.trace.run_folder.related_runs import FoundTune, find_tune
from stepscope.trace.run_folder.run_state import origin_of_traces
from stepscope.ui.words import Answer

if TYPE_CHECKING:
    from stepscope.records.explanation import Explanation, Finding, Remedy

# A remedy that `tune` has measured for the same command shows the measurement, not the promise.
# Nothing here may fail an explanation.

YOUR_COMMAND = "your command"
_CLOSE = 1.25  # largest ratio of the run's step to the tune's baseline, either way


def add_origin(explanation: Explanation) -> Explanation:
    """How the run was started, as far as its folder tells."""
    try:
        origin = origin_of_traces(rank.path for rank in explanation.ranks)
    except Exception:
        if os.environ.get("STEPSCOPE_DEBUG"):
            raise
        return explanation
    return replace(explanation, origin=origin)


def tune_of(explanation: Explanation) -> FoundTune | None:
    """The newest tune of this run's command whose baseline trains like this run.

    None for a run that has remedies of its own: they are not what the tune started from.
    """
    origin = explanation.origin
    if origin is None or any(remedy.outcome == "applied" for remedy in origin.remedies):
        return None
    try:
        tune = find_tune(Path(explanation.ranks[0].path).parent.parent, origin)
    except Exception:
        if os.environ.get("STEPSCOPE_DEBUG"):
            raise
        return None
    return tune if tune is not None and _is_baseline(explanation, tune) else None


def _is_baseline(explanation: Explanation, tune: FoundTune) -> bool:
    """A script that was changed since, such as by the tune's own patch, takes another time."""
    if tune.holds_run:
        return True
    baseline, best = tune.result.baseline_ms, tune.result.best_ms
    step = explanation.budget.step_ms
    if explanation.budget.basis == "window" or not baseline or step <= 0:
        return False
    off = abs(math.log(step / baseline))
    if off > math.log(_CLOSE):
        return False
    return not best or not tune.result.kept or off <= abs(math.log(step / best))


def add_trials(explanation: Explanation, tune: FoundTune | None) -> Explanation:
    """Findings get the command to try their remedies, and what was measured already."""
    tried, kept = tried_alone(tune), _kept(tune)
    findings = tuple(
        _with_trials(finding, tried, kept, explanation) for finding in explanation.findings
    )
    return replace(explanation, findings=findings)


def tried_alone(tune: FoundTune | None) -> dict[str, TriedRemedy]:
    """By remedy id."""
    return best_alone(tune.result, str(tune.folder)) if tune else {}


def _kept(tune: FoundTune | None) -> set[str]:
    """Ids of what it kept, alone or together with others."""
    return {name.partition("=")[0] for name in tune.result.kept} if tune else set()


def next_by_tune(explanation: Explanation, tune: FoundTune | None) -> Explanation:
    """What a tune has kept is worth more than any prediction."""
    if tune is None or not tune.result.kept:
        return explanation
    baseline, best = tune.result.baseline_ms, tune.result.best_ms
    if baseline is None or best is None:
        return explanation
    steps = f"{significant(baseline)} -> {milliseconds(best)}"
    words = f"apply what tune measured: {', '.join(tune.result.kept)} ({steps})"
    where = f"the patch is in {tune.folder}" if tune.result.patch else f"see {tune.folder}"
    return replace(explanation, next=f"{words}; {where}")


def _with_trials(
    finding: Finding, tried: Mapping[str, TriedRemedy], kept: set[str], explanation: Explanation
) -> Finding:
    remedies = tuple(_with_trial(remedy, tried) for remedy in finding.remedies)
    names = [name for name in applicable(finding) if name not in tried and name not in kept]
    origin = explanation.origin
    in_use = {each.id.partition("=")[0] for each in origin.remedies} if origin else set()
    command = origin.command if origin else ()
    return replace(
        finding,
        remedies=remedies,
        try_command=tune_command([name for name in names if name not in in_use], command),
    )


def _with_trial(remedy: Remedy, tried: Mapping[str, TriedRemedy]) -> Remedy:
    """The best of the ways to the remedy."""
    results = [tried[name] for name in _ways(remedy.id) if name in tried]
    if not results:
        return remedy
    best = min(results, key=by_result)
    return replace(
        remedy,
        measured_ms=best.saved(best.measured_ms),
        measured_low_ms=best.saved(best.high_ms),
        measured_high_ms=best.saved(best.low_ms),
        tried=best,
    )


def applicable(finding: Finding) -> list[str]:
    """Ids of the remedies that the fix room can apply, in the finding's order."""
    names = (name for remedy in finding.remedies for name in _ways(remedy.id))
    return [name for name in dict.fromkeys(names) if name in APPLIED]


def _ways(remedy: str) -> tuple[str, ...]:
    return (remedy, *(CHANGES[remedy].ways if remedy in CHANGES else ()))


def tune_command(names: list[str], command: tuple[str, ...]) -> str | None:
    """As typed in a shell; None if nothing can be tried."""
    if not names:
        return None
    words = shlex.join(command) if command else YOUR_COMMAND
    return f"stepscope tune --only {','.join(names)} -- {words}"


# A tune's answer in sentences, from its tune.json.


def run_command(result: TuneResult) -> str:
    """What runs the training with what was kept."""
    return f"stepscope run --with {','.join(result.kept)} -- {shlex.join(result.command)}"


def tune_answer(result: TuneResult, folder: Path) -> Answer:
    verdict = result.verdict or "none of the tried changes makes this training faster"
    return Answer(verdict=verdict, why=_why(result), next=_next(result, folder))


def _why(result: TuneResult) -> str:
    measured = [row for row in result.trials if row.measured_ms is not None]
    failed = sum(row.parity == FAILED for row in result.trials if row.measured_ms is None)
    words = f"{counted(len(measured), 'configuration')} measured against the unchanged command"
    words += f", {failed} failed" if failed else ""
    return f"{words}; {result.control}" if result.control else words


def _next(result: TuneResult, folder: Path) -> str:
    if result.status == "interrupted":
        return f"to resume: stepscope tune --resume {shlex.quote(str(folder))}"
    if result.status == "out of time":
        resume = f"stepscope tune --resume {shlex.quote(str(folder))} --budget TIME"
        if result.leading:
            return f"resume with a larger budget to be sure: {resume}"
        if not result.kept:
            return f"not everything could be tried in time. Resume with a larger budget: {resume}"
    if result.kept:
        return f"make the change below, or: {run_command(result)}"
    if result.starts_differ is not None:
        return "tune again while nothing else uses this machine, or with more --steps"
    return f"see where the time goes: stepscope explain {shlex.quote(str(folder / 'baseline'))}"
