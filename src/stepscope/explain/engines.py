"""Who explains the files: one function, many files, and somewhere for it to run.

pool    a process for each core of this machine (here)
ray     tasks on a Ray cluster (on_ray.py)
torch   the ranks of a torch.distributed job (in_job.py)

An engine gives each file's outcome as it comes. It holds few files in flight and knows nothing of
what the function does; a worker that dies costs its file, never the job.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.trace.discover import size_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from concurrent.futures import Future

    from stepscope.trace.discover import TraceFile
    from stepscope.trace.files import Progress

    Function = Callable[[TraceFile], Any]
    Placed = tuple[int, Any]  # a file's place in the list, its outcome

_PARENT_POLL_S = 0.5
EngineName = Literal["pool", "ray", "torch"]
# A second file waits for each worker, so that none is idle while its result travels.
AHEAD = 2


class Engine(Protocol):
    """Maps a picklable function over files.

    Several processes may be one engine. Only one of them leads: the others yield nothing. Where it
    is collective, all of them must make the same calls.
    """

    @property
    def leads(self) -> bool: ...

    @property
    def collective(self) -> bool: ...

    def agree(self, find: Callable[[], list[TraceFile]]) -> list[TraceFile]:
        """The files to explain, the same on every process that takes part."""
        ...

    def each(self, function: Function, files: Sequence[TraceFile]) -> Iterator[Placed]:
        """Every file once, as they are done."""
        ...


def in_order(
    engine: Engine,
    function: Function,
    files: Sequence[TraceFile],
    progress: Progress | None = None,
) -> Iterator[Any]:
    """Outcomes in the order of the files, each as soon as those before it are there."""
    total, read = sum(map(size_bytes, files)), 0
    waiting: dict[int, Any] = {}
    following = 0
    for place, outcome in engine.each(function, files):
        waiting[place] = outcome
        read += size_bytes(files[place])
        if progress:
            progress(read, total)
        while following in waiting:
            yield waiting.pop(following)
            following += 1


@contextmanager
def open_engine(name: EngineName = "pool", workers: int | None = None) -> Iterator[Engine]:
    """The engine of that name, for as long as the block runs."""
    if name == "ray":
        from stepscope.explain.ray_engine import ray_cluster

        with ray_cluster(workers) as engine:
            yield engine
    elif name == "torch":
        from stepscope.explain.torch_engine import torch_job

        if workers is not None:
            raise UsageError(
                "--workers is for --engine pool and ray; with torch, torchrun sets how many "
                "processes there are"
            )
        with torch_job() as job:
            yield job
    else:
        yield Pool(workers)


def died(file: TraceFile) -> UnreadableInputError:
    """What is said of a file whose worker was killed."""
    return UnreadableInputError(
        f"{file}: the process that read it was killed: there is likely not enough memory for it"
    )


def cores() -> int:
    """Those this process may use, which a container may limit."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


class Here:
    """In this process, one file after the other."""

    leads = True
    collective = False

    def agree(self, find: Callable[[], list[TraceFile]]) -> list[TraceFile]:
        return find()

    def each(self, function: Function, files: Sequence[TraceFile]) -> Iterator[Placed]:
        return ((place, function(file)) for place, file in enumerate(files))


class Pool:
    """A process for each core."""

    leads = True
    collective = False

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or cores()

    def agree(self, find: Callable[[], list[TraceFile]]) -> list[TraceFile]:
        return find()

    def each(self, function: Function, files: Sequence[TraceFile]) -> Iterator[Placed]:
        """A killed worker breaks its whole pool, and nobody knows which file it was: those in
        flight are tried again, each in a process of its own, and a new pool takes the rest."""
        waiting = deque(enumerate(files))
        while waiting:
            suspects = yield from self._until_broken(function, waiting)
            for place, file in suspects:
                yield place, _alone(function, file)

    def _until_broken(
        self, function: Function, waiting: deque[tuple[int, TraceFile]]
    ) -> Generator[Placed, None, list[tuple[int, TraceFile]]]:
        """Gives back what was in flight when the pool broke, if it did."""
        from concurrent.futures import FIRST_COMPLETED, wait
        from concurrent.futures.process import BrokenProcessPool

        flying: dict[Future[Any], tuple[int, TraceFile]] = {}
        pool = _pool(min(self.workers, len(waiting)))
        try:
            while waiting or flying:
                while waiting and len(flying) < AHEAD * self.workers:
                    job = pool.submit(_work, function, waiting[0][1])
                    flying[job] = waiting.popleft()
                for job in wait(flying, return_when=FIRST_COMPLETED).done:
                    outcome = job.result()
                    yield flying.pop(job)[0], outcome
        except BrokenProcessPool:
            suspects = []
            for job, (place, file) in flying.items():
                if job.done() and job.exception() is None:
                    yield place, job.result()
                else:
                    suspects.append((place, file))
            return suspects
        finally:
            pool.shutdown(cancel_futures=True)
        return []


def _alone(function: Function, file: TraceFile) -> Any:
    from concurrent.futures.process import BrokenProcessPool

    with _pool(1) as pool:
        try:
            return pool.submit(_work, function, file).result()
        except BrokenProcessPool:
            return died(file)


def _pool(workers: int) -> Any:
    from concurrent.futures import ProcessPoolExecutor

    return ProcessPoolExecutor(workers, initializer=_begin_worker)


def _begin_worker() -> None:
    """Ctrl-C ends a worker without a word; what is loaded so far is never searched for cycles."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    gc.disable()
    gc.freeze()


def _leave_with(parent: int) -> None:
    """A parent that was killed ends nobody, and its pool would wait for work for good."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


def _work(function: Function, file: TraceFile) -> Any:
    """Looking for cycles once a file costs less than doing so while one is read."""
    try:
        return function(file)
    finally:
        gc.collect()
