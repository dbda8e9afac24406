"""Engines map one function over many files: in this process, in a process for each core, on
a Ray cluster, or inside the training job. Ray and torch load only inside functions.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from stepscope.errors import StepscopeError, UnreadableInputError, UsageError
from stepscope.trace.discover import TraceFile, size_bytes

if TYPE_CHECKING:
    from concurrent.futures import Future

    from stepscope.trace.files import Progress

    FileFunction = Callable[[TraceFile], Any]
    PlacedOutcome = tuple[int, Any]

# An engine yields outcomes as they arrive. It keeps few files in flight and does not know what the
# function returns. A worker that dies loses its file, but not the job.

# A second file is queued for each worker, so that none is idle while its result is sent.
FILES_PER_WORKER = 2


class Engine(ABC):
    """Maps a picklable function over files.

    Several processes may form one engine. One of them leads; the others yield no outcomes.
    """

    leads = True
    collective = False  # whether several processes must make the same calls
    local = True  # whether this process may read a single file itself

    def agree(self, find: Callable[[], list[TraceFile]]) -> list[TraceFile]:
        """The files to read, the same on every process that takes part."""
        return find()

    @abstractmethod
    def map(self, function: FileFunction, files: Sequence[TraceFile]) -> Iterator[PlacedOutcome]:
        """Every file once, in any order."""


def map_in_order(
    engine: Engine,
    function: FileFunction,
    files: Sequence[TraceFile],
    progress: Progress | None = None,
) -> Iterator[Any]:
    """Outcomes in the order of the files, each as soon as all earlier ones are there."""
    total, read = sum(map(size_bytes, files)), 0
    waiting: dict[int, Any] = {}
    following = 0
    for place, outcome in engine.map(function, files):
        waiting[place] = outcome
        read += size_bytes(files[place])
        if progress:
            progress(read, total)
        while following in waiting:
            yield waiting.pop(following)
            following += 1


def worker_died(file: TraceFile) -> UnreadableInputError:
    """The outcome of a file whose worker was killed."""
    return UnreadableInputError(
        f"{file}: the process that read it was killed: there is likely not enough memory for it"
    )


def count_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


# open_engine: the engine that the command line names.

EngineName = Literal["pool", "ray", "torch"]


@contextmanager
def open_engine(name: EngineName = "pool", workers: int | None = None) -> Iterator[Engine]:
    """The engine of that name, for as long as the block runs."""
    if name == "ray":
        with ray_cluster(workers) as cluster:
            yield cluster
    elif name == "torch":
        if workers is not None:
            raise UsageError(
                "--workers is for --engine pool and ray; with torch, torchrun sets how many "
                "processes there are"
            )
        with torch_job() as job:
            yield job
    else:
        yield Pool(workers)


# The engine `pool`: a process for each core of this machine; or this process alone.

_PARENT_POLL_S = 0.5


class Here(Engine):
    """Reads in this process, one file after the other."""

    def map(self, function: FileFunction, files: Sequence[TraceFile]) -> Iterator[PlacedOutcome]:
        return ((place, function(file)) for place, file in enumerate(files))


class Pool(Engine):
    """Reads in worker processes, one for each core."""

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or count_cores()

    def map(self, function: FileFunction, files: Sequence[TraceFile]) -> Iterator[PlacedOutcome]:
        """A killed worker breaks its whole pool, and it is not known which file it had. All files
        in flight are tried again, each in a process of its own; a new pool takes the rest."""
        if _start_method() is None:
            yield from Here().map(function, files)
            return
        waiting = deque(enumerate(files))
        while waiting:
            suspects = yield from self._until_broken(function, waiting)
            for place, file in suspects:
                yield place, _in_own_process(function, file)

    def _until_broken(
        self, function: FileFunction, waiting: deque[tuple[int, TraceFile]]
    ) -> Generator[PlacedOutcome, None, list[tuple[int, TraceFile]]]:
        """Returns the files in flight when the pool broke, if it did."""
        from concurrent.futures import FIRST_COMPLETED, wait
        from concurrent.futures.process import BrokenProcessPool

        in_flight: dict[Future[Any], tuple[int, TraceFile]] = {}
        pool = _start_pool(min(self.workers, len(waiting)))
        try:
            while waiting or in_flight:
                while waiting and len(in_flight) < FILES_PER_WORKER * self.workers:
                    job = pool.submit(_call, function, waiting[0][1])
                    in_flight[job] = waiting.popleft()
                for job in wait(in_flight, return_when=FIRST_COMPLETED).done:
                    outcome = job.result()
                    yield in_flight.pop(job)[0], outcome
        except BrokenProcessPool:
            suspects = []
            for job, (place, file) in in_flight.items():
                if job.done() and job.exception() is None:
                    yield place, job.result()
                else:
                    suspects.append((place, file))
            return suspects
        finally:
            pool.shutdown(cancel_futures=True)
        return []


def _in_own_process(function: FileFunction, file: TraceFile) -> Any:
    from concurrent.futures.process import BrokenProcessPool

    with _start_pool(1) as pool:
        try:
            return pool.submit(_call, function, file).result()
        except BrokenProcessPool:
            return worker_died(file)


def _start_pool(workers: int) -> Any:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context(_start_method())
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare_caller)


def _start_method() -> str | None:
    """How workers are started; None where no way is safe.

    A fork copies locks that other threads hold, and nobody lets go of them. A fresh process
    imports what __main__ is: that would run a user's script a second time.
    """
    if sys.platform == "linux" and threading.active_count() == 1:
        return "fork"
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)  # none in a notebook
    module = getattr(getattr(main, "__spec__", None), "name", None) or Path(file or "").stem
    return "spawn" if file is None or module.partition(".")[0] == "stepscope" else None


def _prepare_caller() -> None:
    """Ctrl-C ends a worker silently; garbage collection skips what is loaded so far."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    gc.disable()
    gc.freeze()


def _exit_with_parent(parent: int) -> None:
    """End this worker when its parent is gone: it would wait for work forever."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


def _call(function: FileFunction, file: TraceFile) -> Any:
    """Collect garbage once per file, which is cheaper than while the file is read."""
    try:
        return function(file)
    finally:
        gc.collect()


# The engine `ray`: tasks on a Ray cluster, or on one that lives as long as the command.
#
# Its nodes need stepscope, and must find the files under the same paths: a shared disk, or URLs.

_QUIET = {"log_to_driver": False, "logging_level": "ERROR"}


@contextmanager
def ray_cluster(workers: int | None = None) -> Iterator[RayCluster]:
    """The running cluster (RAY_ADDRESS, or one on this machine), else a local one of our own."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves this machine
    try:
        import ray
    except ImportError:
        raise UsageError("--engine ray needs Ray: pip install 'stepscope[ray]'") from None
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


# The engine `torch`: inside a job, every rank reads its share and rank 0 gathers the outcomes.
#
# Everything here is collective: each rank makes the same calls in the same order, whatever its
# files hold. A rank first reads its whole share. Then fragments go to rank 0 in rounds, so that
# little is in flight at once even with many ranks.

_IN_FLIGHT_BYTES = 64 << 20  # of all ranks together, in one round
_FRAGMENT_BYTES = 32 << 10  # no smaller than this
_TIMEOUT_S = 12 * 3600.0  # the slowest rank may have a very long trace
_STARTED_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def torch_job() -> Iterator[TorchJob]:
    """The job that torchrun started this process in."""
    if not all(name in os.environ for name in _STARTED_BY_TORCHRUN):
        raise UsageError(
            "--engine torch runs inside a job: "
            "torchrun --nproc-per-node=4 -m stepscope explain PATH --engine torch"
        )
    dist = import_distributed()
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    try:
        yield TorchJob(dist, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


class _Fragment(NamedTuple):
    """A piece of one file's outcome."""

    place: int
    last: bool
    data: bytes


class TorchJob(Engine):
    """A group of processes; each reads some of the files."""

    collective, local = True, False

    def __init__(self, dist: Any, group: Any) -> None:
        self._dist, self._group = dist, group
        self.rank: int = dist.get_rank(group)
        self.world: int = dist.get_world_size(group)
        self._owners: dict[str, int] = {}
        self.leads = self.rank == 0

    def agree(self, find: Callable[[], list[TraceFile]]) -> list[TraceFile]:
        """The files that rank 0 sees, then those that only others see. One that sees it owns it."""
        files, error = _try_find(find)
        from_leader: list[Any] = [files]
        self._dist.broadcast_object_list(from_leader, src=0, group=self._group)
        common: list[TraceFile] = from_leader[0]
        seen, known = set(map(str, files)), set(map(str, common))
        lacking = {place for place, file in enumerate(common) if str(file) not in seen}
        views = self._all_gather((lacking, [file for file in files if str(file) not in known]))
        more = {str(file): file for _, extra in views for file in extra}
        agreed = common + [more[name] for name in sorted(more)]
        holders = [
            [rank for rank, (lacks, _) in enumerate(views) if place not in lacks]
            for place in range(len(common))
        ] + [
            [rank for rank, (_, extra) in enumerate(views) if name in map(str, extra)]
            for name in sorted(more)
        ]
        for place, (file, ranks) in enumerate(zip(agreed, holders, strict=True)):
            self._owners[str(file)] = ranks[place % len(ranks)]
        if not agreed:
            raise error or UnreadableInputError("no rank sees a trace")
        return agreed

    def map(self, function: FileFunction, files: Sequence[TraceFile]) -> Iterator[PlacedOutcome]:
        mine = []
        for place, file in enumerate(files):
            if self._owners[str(file)] == self.rank:
                # Never raises: the other ranks wait for this one in the next
                # collective call.
                try:
                    outcome = function(file)
                except Exception as error:
                    outcome = StepscopeError(f"{file}: {type(error).__name__}: {error}")
                mine.append((place, pickle.dumps(outcome, protocol=pickle.HIGHEST_PROTOCOL)))
        fragment_bytes = max(_FRAGMENT_BYTES, _IN_FLIGHT_BYTES // self.world)
        fragments = [*_cut(mine, fragment_bytes)]
        mine.clear()
        partial: dict[int, bytearray] = {}
        for turn in range(max(self._all_gather(len(fragments)))):
            own = fragments[turn] if turn < len(fragments) else None
            parts: list[_Fragment | None] | None = [None] * self.world if self.leads else None
            self._dist.gather_object(own, parts, dst=0, group=self._group)
            for part in filter(None, parts or ()):
                partial.setdefault(part.place, bytearray()).extend(part.data)
                if part.last:
                    yield part.place, pickle.loads(partial.pop(part.place))

    def _all_gather(self, own: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        out: list[Any] = [None] * self.world
        self._dist.all_gather_object(out, own, group=self._group)
        return out


def _try_find(find: Callable[[], list[TraceFile]]) -> tuple[list[TraceFile], StepscopeError | None]:
    try:
        return find(), None
    except StepscopeError as error:
        return [], error
    except Exception as error:  # the other ranks wait for this one
        return [], StepscopeError(f"{type(error).__name__}: {error}")


def _cut(outcomes: list[tuple[int, bytes]], fragment_bytes: int) -> Iterator[_Fragment]:
    for place, data in outcomes:
        for start in range(0, len(data), fragment_bytes):
            piece = data[start : start + fragment_bytes]
            yield _Fragment(place, start + fragment_bytes >= len(data), piece)


@contextmanager
def own_group(dist: Any, timeout_s: float) -> Iterator[Any]:
    """NCCL cannot send Python objects without a device, nor wait as long as reading takes."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    yield group
    dist.destroy_process_group(group)


def import_distributed() -> Any:
    try:
        import torch.distributed as dist
    except ImportError:
        raise UsageError("--engine torch needs PyTorch: pip install 'stepscope[torch]'") from None
    if not dist.is_available():
        raise UsageError("--engine torch: this PyTorch was built without torch.distributed")
    return dist
