"""The engine `ray`: tasks on a Ray cluster, or on one that lives as long as the command.

Its nodes need stepscope installed, and must find the files under the same paths: a shared disk, or
URLs.
"""

from __future__ import annotations

import os
import pickle
import sys
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from stepscope.errors import UsageError
from stepscope.explain.engines import AHEAD, cores, died

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stepscope.explain.engines import Function, Placed
    from stepscope.trace.discover import TraceFile

_QUIET = {"log_to_driver": False, "logging_level": "ERROR"}


@contextmanager
def ray_cluster(workers: int | None = None) -> Iterator[Cluster]:
    """The running cluster (RAY_ADDRESS, or one on this machine), else a local one of our own."""
    ray = _ray()
    ours = not ray.is_initialized()  # else it is not ours to end
    with redirect_stdout(sys.stderr):  # Ray tells of lost workers on stdout, which is not its own
        if ours:
            _connect(ray, workers)
        try:
            yield Cluster(ray, workers)
        finally:
            if ours:
                ray.shutdown()


class Cluster:
    """A connected Ray cluster."""

    leads = True
    collective = False

    def __init__(self, ray: Any, workers: int | None) -> None:
        self._ray = ray
        self.workers = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))

    def agree(self, find: Callable[[], list[TraceFile]]) -> list[TraceFile]:
        return find()

    def each(self, function: Function, files: Sequence[TraceFile]) -> Iterator[Placed]:
        ray = self._ray
        # Ray itself tries a task again whose worker died.
        task = ray.remote(num_cpus=1, max_retries=1)(_work)
        shared = ray.put(function)
        flying: dict[Any, int] = {}
        following = 0
        while flying or following < len(files):
            while following < len(files) and len(flying) < self._at_once():
                flying[task.remote(shared, files[following])] = following
                following += 1
            (job,), _ = ray.wait(list(flying), num_returns=1)
            place = flying.pop(job)
            yield place, self._outcome(job, files[place])

    def _at_once(self) -> int:
        return AHEAD * self.workers

    def _outcome(self, job: Any, file: TraceFile) -> Any:
        lost = self._ray.exceptions
        try:
            return pickle.loads(self._ray.get(job))
        except lost.RayTaskError as error:  # raised by the function itself
            raise error.as_instanceof_cause() from None
        except (lost.RaySystemError, lost.RayError):
            return died(file)


def _work(function: Function, file: TraceFile) -> bytes:
    """As bytes: columns read straight from Ray's store would keep it full for as long as we run."""
    return pickle.dumps(function(file), protocol=pickle.HIGHEST_PROTOCOL)


def _connect(ray: Any, workers: int | None) -> None:
    try:
        ray.init(address="auto", **_QUIET)
        return
    except (ConnectionError, RuntimeError) as error:
        if address := os.environ.get("RAY_ADDRESS"):
            raise UsageError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error}") from None
    ray.init(address="local", num_cpus=workers or cores(), include_dashboard=False, **_QUIET)


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves this machine
    try:
        import ray
    except ImportError:
        raise UsageError("--engine ray needs Ray: pip install 'stepscope[ray]'") from None
    return ray
