"""Engines map one function over many files, in this process or elsewhere.

pool_engine.py    processes on this machine, or this process alone
ray_engine.py     tasks on a Ray cluster
torch_engine.py   the ranks of a torch.distributed job

An engine yields outcomes as they arrive. It keeps few files in flight and does not know what the
function returns. A worker that dies loses its file, but not the job.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from stepscope.errors import UnreadableInputError
from stepscope.trace.discover import size_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stepscope.trace.discover import TraceFile
    from stepscope.trace.files import Progress

    FileFunction = Callable[[TraceFile], Any]
    PlacedOutcome = tuple[int, Any]  # a file's place in the list, its outcome

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
