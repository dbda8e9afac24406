"""The engine `pool`: a process for each core of this machine; or this process alone."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.explain.engines import FILES_PER_WORKER, Engine, count_cores, worker_died

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from concurrent.futures import Future

    from stepscope.explain.engines import FileFunction, PlacedOutcome
    from stepscope.trace.discover import TraceFile

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
