"""Train the settings of a sweep that have not ended yet."""

from __future__ import annotations

import math
import runpy
import traceback
from typing import TYPE_CHECKING, Any

from stepscope.errors import NotCapturedError, StepscopeError, UsageError
from stepscope.records.figures import significant
from stepscope.ui.sweep.journal import BEST, EndedTrial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stepscope.fix.fuse.trials import SweptTrial
    from stepscope.ui.sweep.journal import SweepJournal
    from stepscope.ui.terminal.tune_progress import TuneProgress


def run_sweep(journal: SweepJournal, progress: TuneProgress) -> None:
    """Every ended trial is in the journal at once; the best one's weights are beside it."""
    from stepscope.fix.fuse.sweep import grid, sweep

    start = journal.start
    build = _load_build(start.script)
    settings = grid(**start.grid)
    done = {trial.number for trial in journal.ended}
    left = [number for number in range(len(settings)) if number not in done]

    def configs() -> Iterator[dict[str, Any]]:
        yield from (settings[number] for number in left)

    def look(trial: SweptTrial) -> bool:
        words = _words(trial.config)
        loss = significant(trial.loss)
        progress.trying(f"{words}: step {trial.step} of {start.steps}, loss {loss}")
        return not math.isfinite(trial.loss)

    options = {"steps": start.steps, "width": start.fuse, "every": start.every, "seed": start.seed}
    try:
        for trial in sweep(build, configs(), **options, stop=look):
            _record(journal, trial, left[trial.number], progress)
    except StepscopeError:
        raise
    except Exception as error:
        raise _failure(start.script, error) from error


def _record(journal: SweepJournal, trial: SweptTrial, number: int, progress: TuneProgress) -> None:
    finite = math.isfinite(trial.loss)
    ended = EndedTrial(
        number=number,
        config=dict(trial.config),
        state="finished" if trial.state == "finished" else "stopped",
        steps=trial.step,
        losses=trial.losses,
        loss=trial.loss if finite else None,
    )
    journal.add(ended)
    how = f"loss {significant(trial.loss)}" if finite else "its loss is not finite"
    progress.news(f"{_words(trial.config)}: {ended.state} after {trial.step} steps, {how}")
    if journal.best() is ended:
        _save(journal, trial)


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
        raise _failure(script, error) from error
    build = names.get("build")
    if not callable(build):
        raise UsageError(
            f"{script} has no function build(config) that returns model, optimizer, data and loss",
            "docs/sweep.md has an example",
        )
    found: Callable[..., Any] = build
    return found


def _failure(script: str, error: Exception) -> StepscopeError:
    """The place in the user's own file, where there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == script]
    where = f" in line {own[-1].lineno}" if own else ""
    return NotCapturedError(f"{script}{where}: {type(error).__name__}: {error}")


def _words(config: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())
