"""Train the settings of a sweep that have not ended yet."""

from __future__ import annotations

import math
import runpy
import traceback
from typing import TYPE_CHECKING, Any

from stepscope.errors import NotCapturedError, UsageError
from stepscope.records.addresses import SITE
from stepscope.ui.sweep.journal import BEST, EndedTrial

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.fix.fuse.trials import SweptTrial
    from stepscope.ui.sweep.journal import SweepJournal
    from stepscope.ui.sweep.table import SweepTable


def run_sweep(journal: SweepJournal, shown: SweepTable) -> None:
    """Every ended trial is in the journal at once; the best one's weights are beside it."""
    from stepscope.fix.fuse.sweep import grid, sweep

    start = journal.start
    build = _load_build(start.script)
    settings = grid(**start.grid)
    done = {trial.number for trial in journal.ended}
    left = [number for number in range(len(settings)) if number not in done]

    def look(trial: SweptTrial) -> bool:
        shown.training(left[trial.number], trial)
        return not math.isfinite(trial.loss)

    configs = (settings[number] for number in left)
    trials = sweep(
        build,
        configs,
        steps=start.steps,
        width=start.fuse,
        every=start.every,
        seed=start.seed,
        stop=look,
    )
    for trial in trials:
        ended = _describe(trial, left[trial.number], start.script)
        if journal.is_better(ended):
            _save(journal, trial)  # first: what is in the journal is not trained again
        journal.add(ended)
        shown.ended(ended)
    if journal.ended and all(trial.state == "failed" for trial in journal.ended):
        raise NotCapturedError(f"every trial failed, the first one because {journal.ended[0].why}")


def _describe(trial: SweptTrial, number: int, script: str) -> EndedTrial:
    finite = math.isfinite(trial.loss)
    why = None
    if trial.error is not None:
        why = _failure(script, trial.error)
    elif trial.state == "stopped":
        why = "its loss is not finite"
    return EndedTrial(
        number=number,
        config=dict(trial.config),
        state=trial.state,  # type: ignore[arg-type]
        steps=trial.step,
        losses=[loss for loss in trial.losses if math.isfinite(loss)],
        loss=trial.loss if finite else None,
        why=why,
    )


def _save(journal: SweepJournal, trial: SweptTrial) -> None:
    import torch

    assert trial.model is not None
    new = journal.folder / f"{BEST}.new"
    torch.save({"config": dict(trial.config), "model": trial.model.state_dict()}, new)
    new.replace(journal.folder / BEST)


def _load_build(script: str) -> Callable[..., Any]:
    """The script's `build`; what it does only as a program is not run."""
    try:
        names = runpy.run_path(script, run_name="stepscope_sweep")
    except FileNotFoundError:
        raise UsageError(f"{script} does not exist") from None
    except Exception as error:
        raise NotCapturedError(_failure(script, error)) from error
    build = names.get("build")
    if not callable(build):
        raise UsageError(
            f"{script} has no function build(config) that returns model, optimizer, data and loss",
            f"see {SITE}/reference/libraries/sweep/ for an example",
        )
    found: Callable[..., Any] = build
    return found


def _failure(script: str, error: BaseException) -> str:
    """What was raised, and the place in the user's own file where there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == script]
    where = f" in line {own[-1].lineno}" if own else ""
    return f"{script}{where}: {type(error).__name__}: {error}"
