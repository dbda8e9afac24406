"""The engine `ray`: tasks on a Ray cluster, or on one that lives as long as the command.

Its nodes need stepscope, and must find the files under the same paths: a shared disk, or URLs.
"""

from __future__ import annotations

import os
import pickle
import sys
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from stepscope.errors import UsageError
from stepscope.explain.engines import FILES_PER_WORKER, Engine, count_cores, worker_died

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stepscope.explain.engines import FileFunction, PlacedOutcome
    from stepscope.trace.discover import TraceFile

_QUIET = {"log_to_driver": False, "logging_level": "ERROR"}


@contextmanager
def ray_cluster(workers: int | None = None) -> Iterator[RayCluster]:
    """The running cluster (RAY_ADDRESS, or one on this machine), else a local one of our own."""
    ray = _import_ray()
    ours = not ray.is_initialized()  # else it is not ours to end
    with redirect_stdout(sys.stderr):  # Ray reports lost workers on stdout, where our answer goes
        if ours:
            _connect(ray, workers)
        try:
            yield RayCluster(ray, workers)
        finally:
            if ours:
                ray.shutdown()


class RayCluster(Engine):
    """A connected Ray cluster."""

    local = False

    def __init__(self, ray: Any, workers: int | None) -> None:
        self._ray = ray
        self.workers = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))

    def map(self, function: FileFunction, files: Sequence[TraceFile]) -> Iterator[PlacedOutcome]:
        ray = self._ray
        # Ray itself retries a task whose worker died.
        task = ray.remote(num_cpus=1, max_retries=1)(_call_to_bytes)
        shared = ray.put(function)
        in_flight: dict[Any, int] = {}
        following = 0
        while in_flight or following < len(files):
            while following < len(files) and len(in_flight) < FILES_PER_WORKER * self.workers:
                in_flight[task.remote(shared, files[following])] = following
                following += 1
            (job,), _ = ray.wait(list(in_flight), num_returns=1)
            place = in_flight.pop(job)
            yield place, self._outcome(job, files[place])

    def _outcome(self, job: Any, file: TraceFile) -> Any:
        lost = self._ray.exceptions
        try:
            return pickle.loads(self._ray.get(job))
        except lost.RayTaskError as error:  # raised by the function itself
            raise error.as_instanceof_cause() from None
        except (lost.RaySystemError, lost.RayError):
            return worker_died(file)


def _call_to_bytes(function: FileFunction, file: TraceFile) -> bytes:
    """Bytes, because columns read straight from Ray's store would keep it full."""
    return pickle.dumps(function(file), protocol=pickle.HIGHEST_PROTOCOL)


def _connect(ray: Any, workers: int | None) -> None:
    try:
        ray.init(address="auto", **_QUIET)
        return
    except (ConnectionError, RuntimeError) as error:
        if address := os.environ.get("RAY_ADDRESS"):
            raise UsageError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error}") from None
    ray.init(address="local", num_cpus=workers or count_cores(), include_dashboard=False, **_QUIET)


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves this machine
    try:
        import ray
    except ImportError:
        raise UsageError("--engine ray needs Ray: pip install 'stepscope[ray]'") from None
    return ray
