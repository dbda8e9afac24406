"""The answer of a sweep: the best setting first, then all of them."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from msgspec import to_builtins

from stepscope.records.figures import significant
from stepscope.records.words import counted
from stepscope.ui.sweep.journal import BEST

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
    ended, best = _in_order(journal), journal.best()
    lines = [f"verdict  {_verdict(best)}"]
    lines += [f"         {counted(len(ended), 'trial')} of {_settings(journal)} ended", ""]
    lines += [_row(trial) for trial in ended]
    if best:
        lines += ["", f"weights  {journal.folder / BEST}"]
    return "\n".join(lines)


def _verdict(best: EndedTrial | None) -> str:
    if best is None:
        return "no trial has finished"
    return f"{_config(best)} ends with the lowest loss, {significant(best.loss or 0.0)}"


def _row(trial: EndedTrial) -> str:
    loss = significant(trial.loss) if trial.loss is not None else "not finite"
    return f"{loss:>10}  {_config(trial)}  {trial.state} after {counted(trial.steps, 'step')}"


def _config(trial: EndedTrial) -> str:
    return " ".join(f"{name}={value}" for name, value in trial.config.items())


def _in_order(journal: SweepJournal) -> list[EndedTrial]:
    """The lowest loss first; those without one last."""
    return sorted(journal.ended, key=lambda one: (one.loss is None, one.loss or 0.0, one.number))


def _settings(journal: SweepJournal) -> int:
    return math.prod(len(values) for values in journal.start.grid.values())
