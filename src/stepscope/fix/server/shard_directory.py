"""Where each shard is served, and who takes over when its actor dies."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from stepscope.fix.server.messages import (
    Ack,
    AddBackup,
    Counted,
    Ping,
    Promote,
    Route,
    Stale,
    Unreachable,
)
from stepscope.fix.server.restored_shard import as_of_now, lost_updates, restored_sentence
from stepscope.records.together import ShardRestored

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from stepscope.fix.server.clocks import ClockTable
    from stepscope.fix.server.messages import DropBackup, Routes
    from stepscope.fix.server.shard_state import ShardSnapshot
    from stepscope.records.together import LostUpdates, ServerEvent

_PING_S = 1.0
_PAUSE_S = 1.0  # before another backup is tried


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long silence is borne."""

    worker_deadline_s: float = 30.0
    shard_deadline_s: float = 10.0


class CoordinatorSurroundings(Protocol):
    """What the coordinator needs of the cluster."""

    async def ask(self, address: Any, message: Any, timeout_s: float | None = None) -> Any:
        """Raises Unreachable."""

    async def start_shard(
        self, shard: int, epoch: int, snapshot: ShardSnapshot | None, copy: int
    ) -> tuple[str, Any]:
        """A new actor's name and address: a primary with a snapshot, a backup without."""

    def stop_shard(self, address: Any) -> None:
        """End an actor that is not needed any more, if it still lives."""

    async def keep_cut(
        self, cut: int, counts: dict[str, int], shards: Sequence[ShardSnapshot]
    ) -> None:
        """Save a checkpoint."""

    def log(self, event: ServerEvent) -> None: ...


@dataclass(kw_only=True, slots=True)
class _Serving:
    """The actors of one shard; None for the primary while it is restored."""

    epoch: int
    primary: Any
    backups: dict[str, Any] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ShardDirectory:
    """`first` are the shards' values before any update, `last_cut` those of the last checkpoint."""

    def __init__(
        self,
        first: Sequence[ShardSnapshot],
        table: ClockTable,
        surroundings: CoordinatorSurroundings,
        *,
        replicas: int,
        deadline_s: float,
    ) -> None:
        self._first = list(first)
        self._table = table
        self._around = surroundings
        self._replicas = replicas
        self._deadline_s = deadline_s
        self._serving: dict[int, _Serving] = {}
        self.last_cut: Sequence[ShardSnapshot] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[int]:
        return iter(self._serving)

    async def start(self) -> None:
        """Start every shard and its backups."""
        started = await asyncio.gather(
            *(
                self._around.start_shard(shard, 1, snapshot, 0)
                for shard, snapshot in enumerate(self._first)
            )
        )
        for shard, (_, address) in enumerate(started):
            self._serving[shard] = _Serving(epoch=1, primary=address)
        await asyncio.gather(*(self.recruit(shard) for shard in self._serving))

    async def changed_since(self, epochs: Mapping[int, int]) -> tuple[int, ...]:
        """Shards that another actor serves now; returns when they are restored."""
        changed = tuple(
            shard
            for shard, serving in self._serving.items()
            if serving.primary is None or epochs.get(shard) != serving.epoch
        )
        for shard in changed:
            async with self._serving[shard].lock:
                pass
        return changed

    def routes(self) -> Routes:
        return {
            shard: Route(shard=shard, epoch=serving.epoch, address=serving.primary)
            for shard, serving in self._serving.items()
        }

    async def tell_all(self, message: Any) -> list[Any]:
        return await asyncio.gather(*(self.tell(shard, message) for shard in self._serving))

    async def tell(self, shard: int, message: Any) -> Any:
        """Until the shard has answered, restored if need be."""
        serving = self._serving[shard]
        while True:
            if serving.primary is None:
                async with serving.lock:
                    pass  # until it is restored
            epoch, address = serving.epoch, serving.primary
            try:
                answer = await self._around.ask(address, message)
            except Unreachable as lost:
                await self.restore(shard, epoch, dead=lost.dead)
                continue
            if not isinstance(answer, Stale):
                return answer
            await asyncio.sleep(_PING_S / 10)

    async def restore(self, shard: int, epoch: int, *, dead: bool) -> None:
        """A backup takes over; without one, the last checkpoint; without one, the beginning."""
        serving = self._serving[shard]
        async with serving.lock:
            if serving.epoch != epoch:
                return
            if not dead and await self._answers(serving.primary, Ping()):
                return
            at, begun = time.time_ns(), time.monotonic_ns()
            gone, serving.primary, serving.epoch = serving.primary, None, epoch + 1
            self._around.stop_shard(gone)
            backups, serving.backups = serving.backups, {}
            source, lost = await self._take_over(shard, serving, backups)
            self._around.log(
                ShardRestored(
                    shard=shard,
                    epoch=serving.epoch,
                    source=source,
                    lost=lost,
                    at_unix_ns=at,
                    took_ns=time.monotonic_ns() - begun,
                    detail=restored_sentence(shard, source, lost),
                )
            )
        self._in_background(self.recruit(shard))

    async def _take_over(
        self, shard: int, serving: _Serving, backups: dict[str, Any]
    ) -> tuple[Any, tuple[LostUpdates, ...]]:
        """The source of the new primary's values, and what they lack."""
        for address in backups.values():
            if serving.primary is None and await self._answers(
                address, Promote(epoch=serving.epoch)
            ):
                serving.primary = address
            else:
                self._around.stop_shard(address)
        if serving.primary is not None:
            return "replica", ()
        source, snapshot = "start", self._first[shard]
        if self.last_cut is not None:
            source, snapshot = "checkpoint", self.last_cut[shard]
        lost = lost_updates(snapshot, self._table)
        restored = as_of_now(snapshot, self._table)
        _, serving.primary = await self._around.start_shard(shard, serving.epoch, restored, 0)
        return source, lost

    async def _answers(self, address: Any, message: Any) -> bool:
        """Whether it agrees, before its time is up; asked again if no answer came."""
        until = asyncio.get_running_loop().time() + self._deadline_s
        while asyncio.get_running_loop().time() < until:
            try:
                answer = await self._around.ask(address, message, timeout_s=_PING_S)
            except Unreachable as lost:
                if lost.dead:
                    return False
                await asyncio.sleep(_PING_S / 4)
                continue
            return isinstance(answer, Ack)
        return False

    async def recruit(self, shard: int, after_s: float = 0.0) -> None:
        """Give the shard the backups that it should have."""
        await asyncio.sleep(after_s)
        serving = self._serving[shard]
        while True:
            async with serving.lock:
                if len(serving.backups) >= self._replicas:
                    return
                epoch, copy = serving.epoch, len(serving.backups) + 1
                try:
                    name, address = await self._around.start_shard(shard, epoch, None, copy)
                except Unreachable:
                    return  # no machine to start it on
                serving.backups[name] = address
                try:
                    add = AddBackup(backup=name, address=address)
                    await self._around.ask(serving.primary, add)
                    continue
                except Unreachable as lost:
                    dead = lost.dead
                    serving.backups.pop(name, None)
                    self._around.stop_shard(address)
            await self.restore(shard, epoch, dead=dead)

    def drop_backup(self, message: DropBackup) -> Counted | Stale:
        serving = self._serving[message.shard]
        if serving.epoch != message.epoch or serving.primary is None:
            return Stale()
        address = serving.backups.pop(message.backup, None)
        if address is not None:
            self._around.stop_shard(address)
            self._in_background(self.recruit(message.shard, after_s=_PAUSE_S))
        return Counted()

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
