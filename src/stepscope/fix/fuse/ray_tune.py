"""Ray Tune's trials, trained in arrays: each is a trial of its own to Tune's searchers and
schedulers, and one model of an array to the GPU.

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

Ray places the arrays over GPUs and machines. A trial that Tune stops leaves its array, and the next
one joins. An array whose process or machine dies is started again by Ray and goes on from its last
checkpoint in `folder`, which all machines must share.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import NotCapturedError, UsageError
from stepscope.fix.fuse.trial_host import TrialHost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stepscope.fix.fuse.trials import Build

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
                            resources=dict(resources or {}))(_Host)  # fmt: skip
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
        """What tune.Tuner takes. Its reports have `loss` (the mean of the last `every` steps) and
        `step`."""
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
        """None: not yet. A host that was started again may not know the trial, which then joins
        anew; its reports are the same, wherever it trains."""
        import ray

        if self._host is None and not self._join():
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

    def _join(self) -> bool:
        """Trials begin at different hosts, so that these fill alike."""
        import ray

        first = sum(map(ord, self._name)) % len(self._hosts)
        for host in self._hosts[first:] + self._hosts[:first]:
            if ray.get(host.join.remote(self._name, self._config)):
                self._host = host
                return True
        return False


class _Host(TrialHost):
    """A TrialHost in a process of Ray."""

    def process_id(self) -> int:
        return os.getpid()


def import_ray() -> Any:
    """UsageError where it is missing."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves this machine
    try:
        import ray
        import ray.tune
    except ImportError as error:
        raise UsageError(f"ArrayPool needs Ray Tune: pip install 'ray[tune]' ({error})") from None
    return ray
