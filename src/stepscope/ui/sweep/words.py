"""The answer of a sweep: the best setting first, then all of them."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from typing import TYPE_CHECKING

from msgspec import to_builtins

from stepscope.records.figures import significant
from stepscope.records.words import counted
from stepscope.ui.sweep.journal import BEST
from stepscope.ui.sweep.table import config_words, ending_words
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from stepscope.ui.sweep.journal import EndedTrial, SweepJournal


def sweep_json(journal: SweepJournal) -> str:
    best = journal.best()
    return json.dumps(
        {
            "schema": 1,
            "folder": str(journal.folder),
            "script": journal.start.script,
            "settings": _settings(journal),
            "best": to_builtins(best) if best else None,
            "trials": [to_builtins(trial) for trial in _in_order(journal)],
        },
        indent=2,
    )


def sweep_text(journal: SweepJournal) -> str:
    """Verdict, why, next; then every trial that has ended."""
    ended, best = _in_order(journal), journal.best()
    lines = [f"verdict  {_verdict(best)}", f"why      {_why(journal, ended)}"]
    lines += [f"next     {_next(journal, best)}", ""]
    lines += [_row(trial) for trial in ended]
    return "\n".join(one_line(line) for line in lines)


def _verdict(best: EndedTrial | None) -> str:
    if best is None:
        return "no trial has finished"
    return f"{config_words(best.config)} has the lowest loss, {significant(best.loss or 0.0)}"


def _why(journal: SweepJournal, ended: list[EndedTrial]) -> str:
    """How many ended in which way, and how close the second best is."""
    states = Counter(trial.state for trial in ended)
    ways = ", ".join(f"{number:,} {state}" for state, number in sorted(states.items()))
    words = f"{len(ended):,} of {counted(_settings(journal), 'trial')} ended"
    words += f": {ways}" if ways else ""
    finished = [trial for trial in ended if trial.state == "finished" and trial.loss is not None]
    if len(finished) > 1:
        second = finished[1]
        words += f"; the second best is {config_words(second.config)} with "
        words += significant(second.loss or 0.0)
    return words


def _next(journal: SweepJournal, best: EndedTrial | None) -> str:
    """Go on, or use the best weights."""
    if len(journal.ended) < _settings(journal):
        script = shlex.quote(journal.start.script)
        return f"to go on: stepscope sweep {script} --resume {shlex.quote(str(journal.folder))}"
    if best is None:
        return "see the reasons below, correct the script or its settings, and sweep again"
    return f'load the best weights: torch.load("{journal.folder / BEST}")["model"]'


def _row(trial: EndedTrial) -> str:
    loss = significant(trial.loss) if trial.loss is not None else "-"
    return f"{loss:>10}  {config_words(trial.config)}  {ending_words(trial)}"


def _in_order(journal: SweepJournal) -> list[EndedTrial]:
    """The lowest loss first; those without one last."""
    return sorted(journal.ended, key=lambda one: (one.loss is None, one.loss or 0.0, one.number))


def _settings(journal: SweepJournal) -> int:
    return math.prod(len(values) for values in journal.start.grid.values())
