"""The engine `torch`: inside a job, every rank explains its share and rank 0 gathers summaries.

Everything here is collective: each rank makes the same calls in the same order, whatever its files
hold. A share is explained without a word to the others; then fragments go to rank 0, round by
round, so that what is on its way at once stays small however many ranks there are.
"""

from __future__ import annotations

import logging
import os
import pickle
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.errors import StepscopeError, UnreadableInputError, UsageError
from stepscope.explain.engines import Here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from stepscope.explain.engines import Function, Placed
    from stepscope.records.explanation import Explanation
    from stepscope.trace.discover import TraceFile

_IN_FLIGHT_BYTES = 64 << 20  # of all ranks together, in one round
_FRAGMENT_BYTES = 32 << 10  # no smaller than this
_PATIENCE_S = 12 * 3600.0  # the slowest rank may have a very long trace
_STARTED_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def explain_together(
    *paths: str | Path, cache: bool = True, timeout_s: float = 1800
) -> Explanation | None:
    """Called by every rank, at the end of a training: rank 0 gets the explanation, others None.

    `paths` are as for `explain_job`; ranks that do not share a disk each give what they see. It
    never raises into the training: what went wrong is logged, and the answer is None.
    """
    from stepscope.explain.explain_job import explain_also, explain_share

    try:
        dist = _distributed()
        if not dist.is_initialized():
            return explain_also(paths, cache=cache, engine=Here())[0]
        with _own_group(dist, timeout_s) as group:
            job = Job(dist, group)
            if job.leads:
                return explain_also(paths, cache=cache, engine=job)[0]
            explain_share(paths, cache=cache, engine=job)
    except Exception as error:
        logging.getLogger("stepscope").warning("explain_together: %s", error)
    return None


@contextmanager
def torch_job() -> Iterator[Job]:
    """The job that torchrun started this process in."""
    if not all(name in os.environ for name in _STARTED_BY_TORCHRUN):
        raise UsageError(
            "--engine torch runs inside a job: "
            "torchrun --nproc-per-node=4 -m stepscope explain PATH --engine torch"
        )
    dist = _distributed()
    dist.init_process_group("gloo", timeout=timedelta(seconds=_PATIENCE_S))
    try:
        yield Job(dist, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


class _Fragment(NamedTuple):
    """A piece of one file's outcome."""

    place: int
    last: bool
    data: bytes


class Job:
    """A group of processes of which each explains some files."""

    def __init__(self, dist: Any, group: Any) -> None:
        self._dist, self._group = dist, group
        self.rank: int = dist.get_rank(group)
        self.world: int = dist.get_world_size(group)
        self._owners: dict[str, int] = {}
        self.collective = True

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def agree(self, find: Callable[[], list[TraceFile]]) -> list[TraceFile]:
        """What rank 0 sees, and then what only others see; a file belongs to one that sees it."""
        files, trouble = _tried(find)
        told: list[Any] = [files]
        self._dist.broadcast_object_list(told, src=0, group=self._group)
        common: list[TraceFile] = told[0]
        seen, known = set(map(str, files)), set(map(str, common))
        lacking = {place for place, file in enumerate(common) if str(file) not in seen}
        views = self._all((lacking, [file for file in files if str(file) not in known]))
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
            raise trouble or UnreadableInputError("no rank sees a trace")
        return agreed

    def each(self, function: Function, files: Sequence[TraceFile]) -> Iterator[Placed]:
        mine = []
        for place, file in enumerate(files):
            if self._owners[str(file)] == self.rank:
                mine.append((place, _packed(function, file)))
        yield from self._gathered(mine)

    def _gathered(self, mine: list[tuple[int, bytes]]) -> Iterator[Placed]:
        most = max(_FRAGMENT_BYTES, _IN_FLIGHT_BYTES // self.world)
        fragments = [*_cut(mine, most)]
        mine.clear()
        held: dict[int, bytearray] = {}
        for turn in range(max(self._all(len(fragments)))):
            own = fragments[turn] if turn < len(fragments) else None
            parts: list[_Fragment | None] | None = [None] * self.world if self.leads else None
            self._dist.gather_object(own, parts, dst=0, group=self._group)
            for part in filter(None, parts or ()):
                held.setdefault(part.place, bytearray()).extend(part.data)
                if part.last:
                    yield part.place, pickle.loads(held.pop(part.place))

    def _all(self, own: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        out: list[Any] = [None] * self.world
        self._dist.all_gather_object(out, own, group=self._group)
        return out


def _tried(
    find: Callable[[], list[TraceFile]],
) -> tuple[list[TraceFile], StepscopeError | None]:
    try:
        return find(), None
    except StepscopeError as error:
        return [], error
    except Exception as error:  # the other ranks wait for us all the same
        return [], StepscopeError(f"{type(error).__name__}: {error}")


def _packed(function: Function, file: TraceFile) -> bytes:
    """Whatever happens to a file here, the other ranks are waiting for us in the next call."""
    try:
        outcome = function(file)
    except Exception as error:
        outcome = StepscopeError(f"{file}: {type(error).__name__}: {error}")
    return pickle.dumps(outcome, protocol=pickle.HIGHEST_PROTOCOL)


def _cut(outcomes: list[tuple[int, bytes]], most_bytes: int) -> Iterator[_Fragment]:
    for place, data in outcomes:
        for start in range(0, len(data), most_bytes):
            piece = data[start : start + most_bytes]
            yield _Fragment(place, start + most_bytes >= len(data), piece)


@contextmanager
def _own_group(dist: Any, timeout_s: float) -> Iterator[Any]:
    """NCCL cannot carry Python objects without a device, nor wait for as long as reading takes."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    yield group
    dist.destroy_process_group(group)


def _distributed() -> Any:
    try:
        import torch.distributed as dist
    except ImportError:
        raise UsageError("--engine torch needs PyTorch: pip install 'stepscope[torch]'") from None
    if not dist.is_available():
        raise UsageError("--engine torch: this PyTorch was built without torch.distributed")
    return dist
