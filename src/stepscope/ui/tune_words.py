"""A tune's answer in sentences, from its tune.json."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from stepscope.records.tuning import FAILED
from stepscope.records.words import counted
from stepscope.ui.answer import Answer

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.tuning import TuneResult


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
        if not result.kept:
            return f"not everything could be tried in time. Resume with a larger budget: {resume}"
    if result.kept:
        return f"make the change below, or: {run_command(result)}"
    if result.starts_differ is not None:
        return "tune again while nothing else uses this machine, or with more --steps"
    return f"see where the time goes: stepscope explain {shlex.quote(str(folder / 'baseline'))}"
