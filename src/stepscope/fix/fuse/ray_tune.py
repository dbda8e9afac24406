"""Train Ray Tune's trials in arrays: each is a trial of its own to Tune's searchers and schedulers,
and one model of an array to the GPU.

    from ray import tune
    from stepscope.fix.fuse.ray_tune import ArrayPool

    pool = ArrayPool(build, folder="/shared/search", arrays=4, width=16, steps=2000, num_gpus=1)
    tune.Tuner(
        pool.trainable(),
        param_space={"lr": tune.loguniform(1e-4, 1e-1)},
        tune_config=tune.TuneConfig(
            metric="loss", mode="min", num_samples=256, reuse_actors=True,
            max_concurrent_trials=pool.places, scheduler=tune.schedulers.ASHAScheduler(),
        ),
    ).fit()

Ray places the arrays over GPUs and machines. A trial that Tune stops leaves its array, and the
next one joins. An array whose process or machine dies is started again by Ray and goes on from
its last checkpoint in `folder`, which all machines must share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stepscope.errors import NotCapturedError, UsageError
from stepscope.fix.fuse.sweep import (
    Build,
    SweptTrial,
    TrialArray,
    TrialFailedError,
    start_trial,
)

# A process that trains trials in arrays and gives every one its reports when asked.
#
# Ray Tune's trials ask it. It trains only while somebody waits for a report, saves
# all arrays now and then, and goes on from there when it is started again: a report is the same
# number however often its process dies.

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
        # Trials that left after the checkpoint was written come back with it; nobody asks.
        if time.monotonic() - self._begun > _GRACE_S:
            for gone in list(self._unclaimed):
                self.leave(gone)
        if self._is_full():
            return False
        number = max(self._names, default=-1) + 1
        started = start_trial(self._build, dict(config), number, self._seed)
        self._names[number], self._trials[name] = name, started.trial
        alike = next((array for array in self._arrays if array.kind == started.kind), None)
        if alike is not None:
            alike.add(started)
        else:
            self._arrays.append(TrialArray(started))
        self._joined = time.monotonic()
        return True

    def _is_full(self) -> bool:
        return sum(len(array) for array in self._arrays) >= self._width

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
            if not self._is_full() and time.monotonic() - self._joined < _PATIENCE_S:
                return None  # others may still come to train with
            self._train()
            if len(trial.losses) <= seen:
                return None
        step = (seen + 1) * self._every
        return {"loss": trial.losses[seen], "step": step, "done": step >= self._steps}

    def leave(self, name: str) -> None:
        """Make room for the next."""
        self._unclaimed.discard(name)
        trial = self._trials.pop(name, None)
        if trial is not None:
            del self._names[trial.number]
            self._take_out(trial)

    def _take_out(self, trial: SweptTrial) -> None:
        """Remove a trial from its array, if it is still in one."""
        for array in self._arrays:
            place = next((n for n, one in enumerate(array.trials) if one is trial), None)
            if place is not None:
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
                self._fail([array.trials[error.place]], error.__cause__ or error)
                continue
            except Exception as error:
                self._fail(array.trials, error)
                continue
            for trial in array.trials:
                if trial.step >= self._steps:
                    self._take_out(trial)
                    trial.state = "finished"
                    assert trial.model is not None
                    content = {"config": dict(trial.config), "model": trial.model.state_dict()}
                    _write(content, self._file.parent / f"{self._names[trial.number]}.pt")
                    trial.model = None
        self._rounds += 1
        if self._rounds % self._keep == 0:
            self._save()

    def _fail(self, trials: list[SweptTrial], error: BaseException) -> None:
        for trial in trials:
            trial.error, trial.state = error, "failed"
            self._take_out(trial)

    def _save(self) -> None:
        ended = [
            (name, trial.number, dict(trial.config), trial.step, trial.losses)
            for name, trial in self._trials.items()
            if trial.state == "finished"
        ]
        arrays = [array.checkpoint() for array in self._arrays]
        _write({"arrays": arrays, "names": self._names, "ended": ended}, self._file)

    def _resume(self) -> None:
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


# Ray's side: the pool of hosts, and a trial that asks one of them.

_ASK_AGAIN_S = 0.1
_GIVE_UP_S = 600.0  # without any answer of a host, which Ray tries to start again meanwhile
_TRIAL_CPUS = 0.01  # a trial only asks for reports


class ArrayPool:
    """`arrays` processes of Ray, each with `width` places for trials."""

    def __init__(
        self,
        build: Build,
        *,
        folder: str | Path,
        arrays: int = 1,
        width: int = 8,
        steps: int,
        every: int = 50,
        seed: int = 0,
        checkpoint_every: int = 5,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        """`checkpoint_every` counts reports; `num_cpus` and the like are what Ray gives each
        array."""
        numbers = {"arrays": arrays, "width": width, "steps": steps, "every": every}
        for name, number in {**numbers, "checkpoint_every": checkpoint_every}.items():
            if number < 1:
                raise UsageError(f"{name}={number}: give at least 1")
        if steps % every:
            raise UsageError(f"steps={steps} and every={every}: give a multiple of `every`")
        ray = import_ray()
        if not ray.is_initialized():
            raise UsageError("Ray is not started. Call ray.init() before ArrayPool(...)")
        place = Path(folder).absolute()
        place.mkdir(parents=True, exist_ok=True)
        self.places = arrays * width
        remote = ray.remote(max_restarts=-1, num_cpus=num_cpus, num_gpus=num_gpus,
                            resources=dict(resources or {}))(TrialHost)  # fmt: skip
        self.hosts = [
            remote.remote(
                build,
                place / f"array-{number}.checkpoint",
                width=width,
                steps=steps,
                every=every,
                seed=seed,
                keep=checkpoint_every,
            )
            for number in range(arrays)
        ]

    def trainable(self) -> Any:
        """Return what tune.Tuner takes. Its reports have `step` and `loss`, the mean of the last
        `every` steps."""
        from ray import tune

        hosts = self.hosts

        class FusedTrial(tune.Trainable):
            """Asks an array for the reports of one trial."""

            def setup(self, config: dict[str, Any]) -> None:
                self._asker = HostedTrial(hosts, str(self.trial_id), config)

            def step(self) -> dict[str, Any]:
                return self._asker.next_report()

            def reset_config(self, new_config: dict[str, Any]) -> bool:
                self._asker.leave()
                self._asker = HostedTrial(hosts, str(self.trial_id), new_config)
                return True

            def cleanup(self) -> None:
                self._asker.leave()

            def save_checkpoint(self, checkpoint_dir: str) -> None:
                """The arrays save themselves."""

            def load_checkpoint(self, checkpoint_dir: str | None) -> None:
                """The arrays load themselves."""

        return tune.with_resources(FusedTrial, {"cpu": _TRIAL_CPUS})


class HostedTrial:
    """One trial's side: it joins a host that has room, and follows it through its deaths."""

    def __init__(self, hosts: list[Any], name: str, config: Mapping[str, Any]) -> None:
        self._hosts, self._name, self._config = hosts, name, dict(config)
        self._host: Any = None
        self._seen = 0

    def next_report(self) -> dict[str, Any]:
        """Waits for it."""
        import ray

        deadline = time.monotonic() + _GIVE_UP_S
        while time.monotonic() < deadline:
            try:
                answer = self._ask()
            except ray.exceptions.RayActorError:  # Ray starts it again
                self._host = None
                answer = None
            else:
                deadline = time.monotonic() + _GIVE_UP_S
            if answer:
                self._seen += 1
                return answer
            time.sleep(_ASK_AGAIN_S)
        raise NotCapturedError(
            f"no group of fused models answered trial {self._name} for {_GIVE_UP_S:g} s"
        )

    def _ask(self) -> dict[str, Any] | None:
        """Return the next report; None: not yet. A host that was started again may not know the
        trial, which then joins anew; its reports are the same, wherever it trains."""
        import ray

        if self._host is None:
            # Trials begin at different hosts, so that these fill alike.
            first = sum(map(ord, self._name)) % len(self._hosts)
            for host in self._hosts[first:] + self._hosts[:first]:
                if ray.get(host.join.remote(self._name, self._config)):
                    self._host = host
                    break
            else:
                return None
        answer: dict[str, Any] | None = ray.get(
            self._host.next_report.remote(self._name, self._seen)
        )
        if answer == {}:
            self._host = None
        return answer

    def leave(self) -> None:
        import ray

        if self._host is not None:
            try:
                ray.get(self._host.leave.remote(self._name))
            except ray.exceptions.RayError:
                return  # when it starts again, it forgets trials that nobody asks for


def import_ray() -> Any:
    """UsageError where it is missing."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves this machine
    try:
        import ray
        import ray.tune
    except ImportError as error:
        raise UsageError(f"ArrayPool needs Ray Tune: pip install 'ray[tune]' ({error})") from None
    return ray
