"""One actor of a shard: takes requests one after another, and repeats changes on its backups.

A push is acknowledged when the backups have it too. Only the coordinator decides that a backup is
given up, or takes over: an actor that was cut off and comes back finds out and serves no more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol

from stepscope.fix.server import messages as msg
from stepscope.fix.server.membership import PullServed, ServerEvent, UpdateApplied
from stepscope.fix.server.shard_state import ShardRecipe, ShardSnapshot, ShardState

_POLL_S = 2.0  # an answer that has to wait is asked for again after so long
_RETRY_S = 0.2
_HOLD_S = 5.0


class ShardSurroundings(Protocol):
    """The machine, as a shard's actor needs it."""

    async def ask(self, address: Any, message: Any, timeout_s: float | None = None) -> Any:
        """Raises Unreachable."""

    async def compute(self, function: Callable[[], Any]) -> Any:
        """Run something long without holding up other requests."""

    def publish(self, flat: Any) -> Any:
        """A copy of the bytes that many readers may share, or a reference to it."""

    def log(self, event: ServerEvent) -> None: ...


class ShardServer:
    """`queue_limit` requests of workers may wait; more are sent away until later. A backup that
    does not answer is waited for during `patience_s`."""

    def __init__(
        self,
        recipe: ShardRecipe,
        snapshot: ShardSnapshot | None,
        surroundings: ShardSurroundings,
        *,
        epoch: int,
        coordinator: Any = None,
        queue_limit: int = 64,
        patience_s: float = 10.0,
    ) -> None:
        self._recipe = recipe
        self._state = ShardState(recipe, snapshot) if snapshot is not None else None
        self._around = surroundings
        self._coordinator = coordinator
        self._queue_limit = queue_limit
        self._patience_s = patience_s
        self._epoch = epoch
        self._primary = snapshot is not None
        self._stale = False
        self._index = 0  # of the last change
        self._backups: dict[str, Any] = {}
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._open = asyncio.Event()  # pushes may be applied
        self._open.set()
        self._begun_cut = 0
        self._running: dict[tuple[str, int], asyncio.Future[Any]] = {}
        self._published: tuple[int, Any] | None = None

    async def ask(self, message: Any) -> Any:
        """The answer to any message for a shard."""
        match message:
            case msg.Ping():
                return msg.Stale() if self._stale else msg.Ack(epoch=self._epoch)
            case msg.Load() | msg.Repeat() | msg.Promote():
                return await self._as_backup(message)
            case _ if self._stale or not self._primary:
                return msg.Stale()
            case msg.FetchCut():
                return await self._fetch_cut(message)
            case msg.PushGradients():
                return await self._push_once(message)
            case msg.ReadParameters():
                return await self._in_turn(self._read, message, limited=True)
            case msg.HoldPushes():
                return await self._in_turn(self._hold_pushes, message)
            case msg.AddBackup():
                return await self._greet_and_add(message)
            case _:
                return await self._in_turn(self._change, message)

    # Requests in turn

    async def _push_once(self, message: msg.PushGradients) -> Any:
        """A push that is repeated while it waits gets the answer of the first."""
        key = (message.member, message.clock)
        if key in self._running:
            return await asyncio.shield(self._running[key])
        task = asyncio.ensure_future(self._push(message))
        self._running[key] = task
        task.add_done_callback(lambda _: self._running.pop(key, None))
        return await asyncio.shield(task)

    async def _push(self, message: msg.PushGradients) -> Any:
        while True:
            await self._open.wait()
            answer = await self._in_turn(self._push_if_open, message, limited=True)
            if answer is not None:
                return answer

    async def _push_if_open(self, message: msg.PushGradients, queue: int, waited_ns: int) -> Any:
        return await self._change(message, queue, waited_ns) if self._open.is_set() else None

    async def _in_turn(
        self,
        handle: Callable[[Any, int, int], Awaitable[Any]],
        message: Any,
        *,
        limited: bool = False,
    ) -> Any:
        queue = self._waiting
        if limited and queue >= self._queue_limit:
            return msg.Busy(queue=queue)
        self._waiting += 1
        came_ns = time.monotonic_ns()
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        try:
            if self._stale:
                return msg.Stale()
            return await handle(message, queue, time.monotonic_ns() - came_ns)
        finally:
            self._turn.release()

    async def _change(self, message: msg.Change, queue: int, waited_ns: int) -> Any:
        """Here and on every backup at the same time."""
        index = self._index + 1
        repeat = msg.Repeat(epoch=self._epoch, index=index, change=message)
        answer, *_ = await asyncio.gather(
            self._carry_out(message, queue, waited_ns),
            *(self._repeat(name, repeat) for name in list(self._backups)),
        )
        self._index = index
        if isinstance(message, msg.BeginCut):
            self._begun_cut = max(self._begun_cut, message.cut)
            self._open.set()
        return msg.Stale() if self._stale else answer

    async def _carry_out(
        self, message: msg.Change, queue: int = 0, waited_ns: int = 0, *, replica: bool = False
    ) -> Any:
        state = self._its_state()
        at, begun = time.time_ns(), time.monotonic_ns()
        first = state.updates
        answer = await self._around.compute(lambda: state.change(message))
        for number, step in enumerate(state.steps):
            self._around.log(
                UpdateApplied(
                    shard=self._recipe.shard,
                    epoch=self._epoch,
                    update=first + number,
                    clock=step.clock,
                    members=step.members,
                    at_unix_ns=at,
                    took_ns=time.monotonic_ns() - begun,
                    queue=queue,
                    waited_ns=waited_ns,
                    replica=replica,
                )
            )
        return replace(answer, epoch=self._epoch) if isinstance(answer, msg.Ack) else answer

    async def _read(self, message: msg.ReadParameters, queue: int, waited_ns: int) -> msg.Values:
        state = self._its_state()
        at, begun = time.time_ns(), time.monotonic_ns()
        if self._published is None or self._published[0] != state.updates:
            flat = await self._around.compute(lambda: self._around.publish(state.flat.numpy()))
            self._published = (state.updates, flat)
        size = state.flat.numel()
        self._around.log(
            PullServed(
                shard=self._recipe.shard,
                epoch=self._epoch,
                member=message.member,
                clock=message.clock,
                at_unix_ns=at,
                took_ns=time.monotonic_ns() - begun,
                queue=queue,
                waited_ns=waited_ns,
                size_bytes=size,
            )
        )
        seen = dict(state.counts)
        if self._recipe.synchronous:  # gradients of the open clock are held, not yet applied
            seen = {member: min(count, state.closed) for member, count in seen.items()}
        return msg.Values(epoch=self._epoch, flat=self._published[1], size_bytes=size, seen=seen)

    async def _hold_pushes(self, message: msg.HoldPushes, _queue: int, _waited_ns: int) -> msg.Ack:
        """For a while only: a coordinator that dies in between must not stop the workers."""
        if message.cut > self._begun_cut:
            self._open.clear()
            asyncio.get_running_loop().call_later(_HOLD_S, self._open.set)
        return msg.Ack(epoch=self._epoch, counts=dict(self._its_state().counts))

    async def _fetch_cut(self, message: msg.FetchCut) -> Any:
        """Waits for the last updates that belong to the cut, but not for long."""
        until = asyncio.get_running_loop().time() + _POLL_S
        while True:
            state = self._its_state()
            if message.cut in state.cuts:
                return state.cuts[message.cut] or msg.CutAborted()
            if message.cut not in state.pending_cuts:
                return msg.CutAborted()  # begun on an actor that has died
            if asyncio.get_running_loop().time() > until:
                return msg.NotYet()
            await asyncio.sleep(_RETRY_S / 10)

    # The primary's backups

    async def _greet_and_add(self, message: msg.AddBackup) -> Any:
        """The first contact takes long, and nobody should have to wait for it."""
        try:
            await self._around.ask(message.address, msg.Ping())
        except msg.Unreachable:
            await self._give_up(message.backup)
            return msg.Stale() if self._stale else msg.Ack(epoch=self._epoch)
        return await self._in_turn(self._add_backup, message)

    async def _add_backup(
        self, message: msg.AddBackup, _queue: int, _waited_ns: int
    ) -> msg.Ack | msg.Stale:
        """In turn, so that no change falls between the copy and what is repeated after it."""
        state = self._its_state()
        snapshot = await self._around.compute(state.snapshot)
        load = msg.Load(epoch=self._epoch, index=self._index, snapshot=snapshot)
        self._backups[message.backup] = message.address
        await self._repeat(message.backup, load)
        return msg.Stale() if self._stale else msg.Ack(epoch=self._epoch)

    async def _repeat(self, backup: str, message: msg.Repeat | msg.Load) -> None:
        """Until the backup has it, or the coordinator gave the backup up, or this actor."""
        timeout_s = None if isinstance(message, msg.Load) else self._patience_s  # Load may be large
        patience_until = asyncio.get_running_loop().time() + self._patience_s
        while backup in self._backups and not self._stale:
            try:
                answer = await self._around.ask(self._backups[backup], message, timeout_s=timeout_s)
            except msg.Unreachable as lost:
                if lost.dead or asyncio.get_running_loop().time() > patience_until:
                    await self._give_up(backup)
                continue
            if isinstance(answer, msg.Stale):
                self._stale = True
            return

    async def _give_up(self, backup: str) -> None:
        request = msg.DropBackup(shard=self._recipe.shard, epoch=self._epoch, backup=backup)
        try:
            answer = await self._around.ask(self._coordinator, request)
        except msg.Unreachable:
            await asyncio.sleep(_RETRY_S)
            return
        if isinstance(answer, msg.Stale):
            self._stale = True
        else:
            self._backups.pop(backup, None)

    # A backup

    async def _as_backup(self, message: msg.Load | msg.Repeat | msg.Promote) -> Any:
        async with self._turn:
            if message.epoch < self._epoch or (
                self._primary and not isinstance(message, msg.Promote)
            ):
                return msg.Stale()
            match message:
                case msg.Load() if self._state is None:
                    self._state = ShardState(self._recipe, message.snapshot)
                    self._index, self._epoch = message.index, message.epoch
                case msg.Promote():
                    if self._state is None:
                        return msg.Stale()  # never brought up to date
                    self._primary, self._epoch = True, message.epoch
                case msg.Repeat() if self._state is not None and message.index == self._index + 1:
                    await self._carry_out(message.change, replica=True)
                    self._index = message.index
            return msg.Ack(epoch=self._epoch)

    def _its_state(self) -> ShardState:
        assert self._state is not None, "a primary has a state"
        return self._state
