"""A process that trains trials in arrays and gives every one its reports when asked.

Ray Tune's trials ask it (ray_tune.py). It trains only while somebody waits for a report, saves all
arrays now and then, and goes on from there when it is started again: a report is the same number
however often its process dies.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from stepscope.fix.fuse.trial_array import TrialArray
from stepscope.fix.fuse.trials import TrialFailedError, start_trial

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from stepscope.fix.fuse.trials import Build, StartedTrial, SweptTrial

_PATIENCE_S = 1.0  # that a new trial waits for others to train with
_GRACE_S = 10.0  # that trials of a checkpoint have to ask for their next report


class TrialHost:
    """Trials by name; those of one architecture share an array."""

    def __init__(
        self, build: Build, file: Path, *, width: int, steps: int, every: int, seed: int, keep: int
    ) -> None:
        self._build, self._file = build, file
        self._width, self._steps, self._every, self._seed = width, steps, every, seed
        self._keep = keep  # rounds between two checkpoints
        self._arrays: list[TrialArray] = []
        self._names: dict[int, str] = {}  # by the trial's number
        self._trials: dict[str, SweptTrial] = {}
        self._unclaimed: set[str] = set()  # trials of the checkpoint that have not asked yet
        self._rounds = 0
        self._joined = self._begun = time.monotonic()
        if file.exists():
            self._resume()

    def join(self, name: str, config: Mapping[str, Any]) -> bool:
        """False: no place is free. A trial that is here already stays as it is."""
        if name in self._trials:
            self._unclaimed.discard(name)
            return True
        self._forget_unclaimed()
        if sum(len(array) for array in self._arrays) >= self._width:
            return False
        number = max(self._names, default=-1) + 1
        started = start_trial(self._build, dict(config), number, self._seed)
        self._names[number], self._trials[name] = name, started.trial
        self._place(started)
        self._joined = time.monotonic()
        return True

    def next_report(self, name: str, seen: int) -> dict[str, Any] | None:
        """The report after those that the trial has seen; None: ask again soon; empty: the trial is
        not here. Raises what its program raised, if it has failed."""
        trial = self._trials.get(name)
        if trial is None:
            return {}
        self._unclaimed.discard(name)
        if trial.error is not None:
            raise trial.error
        if len(trial.losses) <= seen:
            if self._waits():
                return None
            self._train()
            if len(trial.losses) <= seen:
                return None
        step = (seen + 1) * self._every
        return {"loss": trial.losses[seen], "step": step, "done": step >= self._steps}

    def leave(self, name: str) -> None:
        """It makes room for the next."""
        self._unclaimed.discard(name)
        trial = self._trials.pop(name, None)
        if trial is None:
            return
        del self._names[trial.number]
        self._take_out(trial)

    def members(self) -> list[str]:
        return sorted(self._trials)

    def _forget_unclaimed(self) -> None:
        """Trials that left after the checkpoint was written come back with it; nobody asks."""
        if time.monotonic() - self._begun > _GRACE_S:
            for name in list(self._unclaimed):
                self.leave(name)

    def _waits(self) -> bool:
        full = sum(len(array) for array in self._arrays) >= self._width
        return not full and time.monotonic() - self._joined < _PATIENCE_S

    def _place(self, started: StartedTrial) -> None:
        for array in self._arrays:
            if array.kind == started.kind:
                array.add(started)
                return
        self._arrays.append(TrialArray(started))

    def _take_out(self, trial: SweptTrial) -> None:
        """Of its array, if it is still in one."""
        for array in list(self._arrays):
            for place in range(len(array)):
                if array.trials[place] is trial:
                    array.remove(place)
                    if not len(array):
                        self._arrays.remove(array)
                    return

    def _train(self) -> None:
        """One report's steps of every array, then whoever is done leaves."""
        for array in list(self._arrays):
            try:
                array.train(self._every)
            except TrialFailedError as error:
                self._fail(array.trials[error.place], error.__cause__ or error)
                continue
            except Exception as error:
                for trial in array.trials:
                    self._fail(trial, error)
                continue
            for trial in array.trials:
                if trial.step >= self._steps:
                    self._take_out(trial)
                    self._save_weights(trial)
        self._rounds += 1
        if self._rounds % self._keep == 0:
            self._save()

    def _fail(self, trial: SweptTrial, error: BaseException) -> None:
        trial.error, trial.state = error, "failed"
        self._take_out(trial)

    def _save_weights(self, trial: SweptTrial) -> None:
        trial.state = "finished"
        assert trial.model is not None
        content = {"config": dict(trial.config), "model": trial.model.state_dict()}
        _write(content, self._file.parent / f"{self._names[trial.number]}.pt")
        trial.model = None

    def _save(self) -> None:
        ended = [
            (name, trial.number, dict(trial.config), trial.step, trial.losses)
            for name, trial in self._trials.items()
            if trial.state == "finished"
        ]
        arrays = [array.checkpoint() for array in self._arrays]
        _write({"arrays": arrays, "names": self._names, "ended": ended}, self._file)

    def _resume(self) -> None:
        from stepscope.fix.fuse.trials import SweptTrial

        saved = torch.load(self._file, weights_only=False)
        self._names = saved["names"]
        for state in saved["arrays"]:
            array = TrialArray.from_checkpoint(self._build, state)
            self._arrays.append(array)
            self._trials |= {self._names[trial.number]: trial for trial in array.trials}
        for name, number, config, step, losses in saved["ended"]:
            self._trials[name] = SweptTrial(
                number=number, config=config, step=step, losses=losses, state="finished"
            )
        known = {trial.number for trial in self._trials.values()}
        self._names = {number: name for number, name in self._names.items() if number in known}
        self._unclaimed = set(self._trials)


def _write(content: Any, path: Path) -> None:
    """Whole or not at all."""
    new = path.with_suffix(".new")
    torch.save(content, new)
    new.replace(path)
