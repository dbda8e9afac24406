"""The coordinator: who takes part, who may read, where each shard is served.

It holds no parameters. A push counts when every shard has acknowledged it in its present epoch, so
whoever is admitted after that reads it, and a failure in between makes the worker send it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stepscope.fix.server import messages as msg
from stepscope.fix.server.membership import (
    CheckpointCut,
    ClockClosed,
    ClockTable,
    CoordinatorSurroundings,
    MemberChange,
    MemberClock,
    ShardDirectory,
    Timing,
    run_in_background,
)

if TYPE_CHECKING:
    from stepscope.fix.server.shard_state import ShardSnapshot
    from stepscope.records.change_values import Consistency

_POLL_S = 2.0  # a worker that has to wait longer asks again
_PING_S = 1.0


class Coordinator:
    """One per server. `first` are the shards' values before any update."""

    def __init__(
        self,
        consistency: Consistency,
        first: Sequence[ShardSnapshot],
        surroundings: CoordinatorSurroundings,
        *,
        replicas: int,
        expected: int = 0,
        timing: Timing | None = None,
        setup: Any = None,
    ) -> None:
        self._table = ClockTable(consistency=consistency, expected=expected)
        self._around = surroundings
        self._timing = timing or Timing()
        self._setup = setup
        self._shards = ShardDirectory(
            first,
            self._table,
            surroundings,
            replicas=replicas,
            deadline_s=self._timing.shard_deadline_s,
        )
        self._joined: dict[str, msg.Joined] = {}  # by token
        self._leaving: set[str] = set()
        self._cuts = 0
        self._checkpointing: asyncio.Future[CheckpointCut] | None = None
        self._changed = asyncio.Condition()
        self._order = asyncio.Lock()  # joins, evictions, closings and cuts, one at a time
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start every shard and its backups."""
        await self._shards.start()

    async def watch(self) -> None:
        """Evict silent members, for ever."""
        every_s = self._timing.worker_deadline_s / 4
        while True:
            due = asyncio.get_running_loop().time() + every_s
            await asyncio.sleep(every_s)
            now = asyncio.get_running_loop().time()
            if now - due > every_s:
                continue  # this process stood still: what members said meanwhile is not read yet
            for name in self._table.overdue(now, self._timing.worker_deadline_s):
                await self._evict_if_silent(name)

    async def _evict_if_silent(self, name: str) -> None:
        """Still silent, when its turn comes."""
        async with self._order:
            now = asyncio.get_running_loop().time()
            if name not in self._table.overdue(now, self._timing.worker_deadline_s):
                return
            member = self._table.members[name]
            silent = f"rank {member.rank} was silent for {now - member.heard_at:.0f} s"
            await self._fence(member, "evicted", f"{silent}. The others go on without it")
        await self._notify()

    async def ask(self, message: Any) -> Any:
        """The answer to any message for the coordinator."""
        name = getattr(message, "member", None)
        if name is not None and name in self._table.members:
            self._table.members[name].heard_at = asyncio.get_running_loop().time()
        match message:
            case msg.Join():
                return await self._join(message)
            case msg.BeginClock():
                return await self._begin(message)
            case msg.FinishClock():
                return await self._finish(message)
            case msg.ReachSyncPoint():
                return await self._reach_sync_point(message)
            case msg.StillHere():
                return msg.Counted() if self._is_member(message.member) else msg.Evicted()
            case msg.Leave():
                await self._let_go(message.member)
                return msg.Counted()
            case msg.ReportShard():
                await self._shards.restore(message.shard, message.epoch, dead=message.dead)
                return msg.Found(routes=self._shards.routes())
            case msg.DropBackup():
                return self._shards.drop_backup(message)
            case msg.TakeCheckpoint():
                return await self._checkpoint_once()
            case msg.ReadState():
                return (await self._take_cut())[1]
            case _:
                return msg.OutOfOrder(why=f"the coordinator does not know {type(message).__name__}")

    # Members

    async def _join(self, message: msg.Join) -> msg.Joined:
        async with self._order:
            if message.token in self._joined:
                return self._joined[message.token]
            rank = self._table.free_rank() if message.rank is None else message.rank
            earlier = self._table.member_of(rank)
            if earlier is not None:
                await self._fence(earlier, "evicted", f"rank {rank} joined again")
            now = asyncio.get_running_loop().time()
            member = self._table.plan_member(rank, now)
            self._table.add(member)  # first: a shard that is restored meanwhile knows it too
            await self._shards.tell_all(msg.Admit(member=member.name, clock=member.count))
            member.heard_at = asyncio.get_running_loop().time()
            joined = msg.Joined(
                member=member.name,
                rank=rank,
                life=member.life,
                clock=member.count,
                sync_points=member.sync_points,
                routes=self._shards.routes(),
                setup=self._setup,
            )
            self._joined[message.token] = joined
            self._log_member("joined", member)
        await self._notify()
        return joined

    async def _let_go(self, name: str) -> None:
        if not self._is_member(name):
            return
        self._leaving.add(name)  # from here on it is told that it was evicted
        async with self._order:
            if name in self._table.members:
                await self._fence(self._table.members[name], "left", "")
        self._leaving.discard(name)
        await self._notify()

    async def _fence(self, member: MemberClock, change: Any, detail: str) -> None:
        """Shards refuse it first: a push on its way is either applied before this or never."""
        self._leaving.add(member.name)
        answers = await self._shards.tell_all(msg.Fence(member=member.name, counted=member.count))
        counts = {answer.count for answer in answers if answer.count is not None}
        torn = not self._table.consistency.synchronous and len(counts) > 1
        if not self._table.consistency.synchronous and not torn:
            # A last push that all shards have is part of the history, though it was not counted.
            member.count = max([member.count, *counts])
        self._table.remove(member.name)
        self._log_member(change, member, detail, torn=torn)

    def _is_member(self, name: str) -> bool:
        return name in self._table.members and name not in self._leaving

    # Clocks

    async def _begin(self, message: msg.BeginClock) -> msg.MayRead | msg.NotYet | msg.Evicted:
        waited_for: int | None = None
        until = asyncio.get_running_loop().time() + _POLL_S
        async with self._changed:
            while self._is_member(message.member):
                blockers = self._table.blockers(message.member, message.clock)
                waited_for = blockers[0] if blockers else waited_for
                if self._table.may_read(message.member, message.clock):
                    return msg.MayRead(routes=self._shards.routes(), waited_for=waited_for)
                if not await self._wait_for_change(until):
                    return msg.NotYet(waiting_for=waited_for)
        return msg.Evicted()

    async def _finish(self, message: msg.FinishClock) -> msg.Counted | msg.SendAgain | msg.Evicted:
        if not self._is_member(message.member):
            return msg.Evicted()
        if message.clock < self._table.members[message.member].count:
            return msg.Counted()  # repeated
        changed = await self._shards.changed_since(message.epochs)
        if changed:
            return msg.SendAgain(shards=changed, routes=self._shards.routes())
        self._table.finish(message.member, message.clock)
        run_in_background(self._tasks, self._close_clocks())
        await self._notify()
        return msg.Counted()

    async def _reach_sync_point(
        self, message: msg.ReachSyncPoint
    ) -> msg.Counted | msg.NotYet | msg.Evicted:
        until = asyncio.get_running_loop().time() + _POLL_S
        if self._is_member(message.member):
            member = self._table.members[message.member]
            member.sync_points = max(member.sync_points, message.number)
            await self._notify()
        async with self._changed:
            while self._is_member(message.member):
                if self._table.reached_by_all(message.number):
                    return msg.Counted()
                if not await self._wait_for_change(until):
                    return msg.NotYet()
        return msg.Evicted()

    async def _close_clocks(self) -> None:
        """Strong consistency: when everybody finished a clock, all shards apply it."""
        async with self._order:
            while (members := self._table.closable()) is not None:
                clock = self._table.closed
                await self._shards.tell_all(msg.CloseClock(clock=clock, members=members))
                self._table.close()
                self._around.log(
                    ClockClosed(clock=clock, members=members, at_unix_ns=time.time_ns())
                )
        await self._notify()

    async def _notify(self) -> None:
        """Wake those who wait; a member that went away may have held up a clock."""
        if self._table.closable() is not None:
            run_in_background(self._tasks, self._close_clocks())
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for_change(self, until: float) -> bool:
        left = until - asyncio.get_running_loop().time()
        try:
            await asyncio.wait_for(self._changed.wait(), max(0.0, left))
        except TimeoutError:
            return False
        return True

    # Checkpoints

    async def _checkpoint_once(self) -> CheckpointCut:
        if self._checkpointing is None or self._checkpointing.done():
            self._checkpointing = asyncio.ensure_future(self._checkpoint())
        return await asyncio.shield(self._checkpointing)

    async def _checkpoint(self) -> CheckpointCut:
        at, begun = time.time_ns(), time.monotonic_ns()
        number, cut = await self._take_cut()
        self._shards.last_cut = cut.shards
        await self._around.keep_cut(number, cut.counts, cut.shards)
        event = CheckpointCut(
            cut=number,
            counts=cut.counts,
            at_unix_ns=at,
            took_ns=time.monotonic_ns() - begun,
            size_bytes=sum(one.size_bytes for one in cut.shards),
        )
        self._around.log(event)
        return event

    async def _take_cut(self) -> tuple[int, msg.Cut]:
        """Again if somebody died meanwhile: a cut has whole updates only."""
        while True:
            async with self._order:
                self._cuts += 1
                number = self._cuts
                counts = await self._begin_cut(number)
            shards = await asyncio.gather(
                *(self._fetch_cut(shard, number) for shard in self._shards)
            )
            if None not in shards:
                return number, msg.Cut(counts=counts, shards=tuple(shards))

    async def _begin_cut(self, cut: int) -> dict[str, int]:
        """The largest counts of any shard: what one shard has applied is on its way to the others.
        While they are collected, pushes wait."""
        if self._table.consistency.synchronous:
            counts = dict.fromkeys(self._table.members, self._table.closed)
        else:
            answers = await self._shards.tell_all(msg.HoldPushes(cut=cut))
            counts = {
                name: max(answer.counts.get(name, 0) for answer in answers)
                for name in self._table.members
            }
        await self._shards.tell_all(msg.BeginCut(cut=cut, counts=counts))
        return counts

    async def _fetch_cut(self, shard: int, cut: int) -> ShardSnapshot | None:
        while isinstance(
            answer := await self._shards.tell(shard, msg.FetchCut(cut=cut)), msg.NotYet
        ):
            pass
        return None if isinstance(answer, msg.CutAborted) else answer

    # Events

    def _log_member(
        self, change: Any, member: MemberClock, detail: str = "", *, torn: bool = False
    ) -> None:
        self._around.log(
            MemberChange(
                change=change,
                worker=member.rank,
                life=member.life,
                clock=member.count,
                at_unix_ns=time.time_ns(),
                detail=detail,
                torn=torn,
            )
        )
