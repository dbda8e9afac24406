"""The engine `torch`: inside a job, every rank reads its share and rank 0 gathers the outcomes.

Everything here is collective: each rank makes the same calls in the same order, whatever its files
hold. A rank first reads its whole share. Then fragments go to rank 0 in rounds, so that little is
in flight at once even with many ranks.
"""

from __future__ import annotations

import os
import pickle
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.errors import StepscopeError, UnreadableInputError, UsageError
from stepscope.explain.engines import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stepscope.explain.engines import FileFunction, PlacedOutcome
    from stepscope.trace.discover import TraceFile

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
                mine.append((place, _call_and_pack(function, file)))
        yield from self._gather(mine)

    def _gather(self, mine: list[tuple[int, bytes]]) -> Iterator[PlacedOutcome]:
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


def _call_and_pack(function: FileFunction, file: TraceFile) -> bytes:
    """Never raises: the other ranks wait for this one in the next collective call."""
    try:
        outcome = function(file)
    except Exception as error:
        outcome = StepscopeError(f"{file}: {type(error).__name__}: {error}")
    return pickle.dumps(outcome, protocol=pickle.HIGHEST_PROTOCOL)


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
