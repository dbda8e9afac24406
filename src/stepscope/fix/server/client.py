"""One worker's side of the protocol: join, read, push, and go on after failures."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any, Protocol

from stepscope.errors import StepscopeError, UsageError
from stepscope.fix.server.messages import (
    Ack,
    BeginClock,
    Busy,
    Evicted,
    FinishClock,
    Found,
    Join,
    Leave,
    MayRead,
    NotYet,
    OutOfOrder,
    PushGradients,
    ReachSyncPoint,
    ReadParameters,
    ReportShard,
    SendAgain,
    StillHere,
    Unreachable,
    Values,
)
from stepscope.records.together import Pull, Push

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stepscope.fix.server.messages import Joined
    from stepscope.records.consistency import Consistency
    from stepscope.records.together import ServerEvent

_FIRST_WAIT_S = 0.01
_LONGEST_WAIT_S = 1.0


class WorkerSurroundings(Protocol):
    """What a worker needs of the machine it runs on."""

    async def ask(self, address: Any, message: Any, timeout_s: float | None = None) -> Any:
        """Raises Unreachable."""

    async def fetch(self, flat: Any) -> Any:
        """The bytes that a shard published. Raises Unreachable."""

    def open_log(self, joined: Joined) -> None:
        """A new life begins."""

    def log(self, event: ServerEvent) -> None: ...


class _WasEvicted(Exception):  # noqa: N818 - not an error: the worker joins again
    """The coordinator went on without this worker."""


class WorkerClient:
    """`give_up_s`: how long an unreachable server is asked again before an error is raised."""

    def __init__(
        self,
        coordinator: Any,
        surroundings: WorkerSurroundings,
        *,
        rank: int | None = None,
        give_up_s: float = 300.0,
    ) -> None:
        self._coordinator = coordinator
        self._around = surroundings
        self._give_up_s = give_up_s
        self.rank = rank
        self.clock = 0
        self.lives = 0
        self._joined: Joined | None = None
        self._routes: dict[int, Any] = {}
        self._may_push = False
        self._sync_points = 0
        self._read_at: int | None = None  # clock of the copy at hand
        self._read_ended_ns: int | None = None
        self._resent = 0
        self._refused_ns = 0

    @property
    def joined(self) -> Joined:
        if self._joined is None:
            raise UsageError("this worker has not joined the server. Use `with server.worker()`")
        return self._joined

    async def join(self) -> Joined:
        """Take part, from the clock that the coordinator says."""
        request = Join(token=uuid.uuid4().hex, rank=self.rank)
        joined: Joined = await self._ask_coordinator(request)
        self._joined = joined
        self.rank, self.clock, self._routes = joined.rank, joined.clock, joined.routes
        self.lives += 1
        self._sync_points = joined.sync_points
        self._may_push, self._read_at, self._read_ended_ns = False, None, None
        self._around.open_log(joined)
        return joined

    async def leave(self) -> None:
        if self._joined is not None:
            member, self._joined = self._joined.member, None
            await self._ask_coordinator(Leave(member=member))

    async def stay(self, every_s: float) -> None:
        """Tell the coordinator that this process lives, for ever."""
        while True:
            await asyncio.sleep(every_s)
            if self._joined is not None:
                try:
                    await self._around.ask(
                        self._coordinator, StillHere(member=self._joined.member), every_s
                    )
                except Unreachable:
                    continue

    # Reading

    async def pull(self, consistency: Consistency) -> dict[int, Any] | None:
        """Flat values by shard; None if the copy at hand is young enough (weak consistency)."""
        while True:
            try:
                return await self._pull(consistency)
            except _WasEvicted:
                await self.join()

    async def _pull(self, consistency: Consistency) -> dict[int, Any] | None:
        at, begun = time.time_ns(), time.monotonic_ns()
        waited_for = await self._wait_until_admitted()
        admitted = time.monotonic_ns()
        young = consistency.mode == "weak" and self._is_young(consistency.bound or 0)
        answers = {} if young else await self._read_all()
        ended = self._read_ended_ns = time.monotonic_ns()
        if not young:
            self._read_at = self.clock
        self._may_push = True
        self._around.log(
            Pull(
                worker=self.joined.rank,
                life=self.joined.life,
                clock=self.clock,
                at_unix_ns=at,
                blocked_ns=admitted - begun,
                transfer_ns=ended - admitted,
                size_bytes=sum(values.size_bytes for values, _ in answers.values()),
                gap=None if young else self._gap([values for values, _ in answers.values()]),
                waited_for=waited_for,
                cached=young,
                seen={str(shard): values.seen for shard, (values, _) in answers.items()},
                epochs={str(shard): values.epoch for shard, (values, _) in answers.items()},
            )
        )
        return None if young else {shard: flat for shard, (_, flat) in answers.items()}

    def _is_young(self, window: int) -> bool:
        return self._read_at is not None and self.clock - self._read_at < window

    async def _wait_until_admitted(self) -> int | None:
        waited_for: int | None = None
        while True:
            request = BeginClock(member=self.joined.member, clock=self.clock)
            answer = await self._ask_coordinator(request)
            if isinstance(answer, MayRead):
                self._routes = answer.routes
                return answer.waited_for if answer.waited_for is not None else waited_for
            waited_for = answer.waiting_for

    async def _read_all(self) -> dict[int, tuple[Values, Any]]:
        shards = list(self._routes)
        answers = await asyncio.gather(*(self._read(shard) for shard in shards))
        return dict(zip(shards, answers, strict=True))

    async def _read(self, shard: int) -> tuple[Values, Any]:
        request = ReadParameters(member=self.joined.member, clock=self.clock)
        while True:
            values: Values = await self._ask_shard(shard, request)
            try:
                return values, await self._around.fetch(values.flat)
            except Unreachable as lost:
                await self._report(shard, values.epoch, dead=lost.dead)

    def _gap(self, answers: list[Values]) -> int:
        me = self.joined.member
        others = [count for one in answers for member, count in one.seen.items() if member != me]
        return max(0, self.clock - min(others)) if others else 0

    # Pushing

    async def push(
        self,
        gradients: Mapping[int, Any],
        settings: tuple[dict[str, Any], ...] | None = None,
        step: int | None = None,
        loss: float | None = None,
    ) -> bool:
        """Packed gradients by shard. False if the worker was evicted meanwhile: it has joined
        again, and this push is not part of the history."""
        if not self._may_push:
            raise UsageError("push() without pull(): a step pulls, computes, then pushes")
        at, begun, ended_ns = time.time_ns(), time.monotonic_ns(), self._read_ended_ns
        self._resent = self._refused_ns = 0
        try:
            await self._push_all(gradients, settings)
        except _WasEvicted:
            await self.join()
            return False
        self._may_push = False
        self._around.log(
            Push(
                worker=self.joined.rank,
                life=self.joined.life,
                clock=self.clock,
                step=step,
                at_unix_ns=at,
                compute_ns=begun - ended_ns if ended_ns is not None else None,
                took_ns=time.monotonic_ns() - begun,
                refused_ns=self._refused_ns,
                size_bytes=sum(one.size_bytes for one in gradients.values()),
                resent=self._resent,
                loss=loss,
            )
        )
        self.clock += 1
        return True

    async def _push_all(
        self, gradients: Mapping[int, Any], settings: tuple[dict[str, Any], ...] | None
    ) -> None:
        """To every shard, and again to those that were restored, until the push counts."""
        missing = tuple(gradients)
        epochs: dict[int, int] = {}
        member, clock = self.joined.member, self.clock
        while True:
            acks = await asyncio.gather(
                *(
                    self._ask_shard(
                        shard,
                        PushGradients(
                            member=member,
                            clock=clock,
                            gradients=gradients[shard],
                            settings=settings,
                        ),
                    )
                    for shard in missing
                )
            )
            epochs.update({shard: ack.epoch for shard, ack in zip(missing, acks, strict=True)})
            finish = FinishClock(member=member, clock=clock, epochs=epochs)
            answer = await self._ask_coordinator(finish)
            if not isinstance(answer, SendAgain):
                return
            missing, self._routes = answer.shards, answer.routes
            self._resent += len(missing)

    async def reach_sync_point(self) -> None:
        """Wait until every worker has come to its sync point; the next pull reads all of it."""
        self._sync_points += 1
        while True:
            request = ReachSyncPoint(member=self.joined.member, number=self._sync_points)
            try:
                answer = await self._ask_coordinator(request)
            except _WasEvicted:
                await self.join()
                return
            if not isinstance(answer, NotYet):
                self._read_at = None
                return

    # Asking

    async def _ask_shard(self, shard: int, message: PushGradients | ReadParameters) -> Any:
        """Until it answers; the coordinator knows where it is served now."""
        wait = _FIRST_WAIT_S
        while True:
            route = self._routes[shard]
            if route.address is None:  # it is being restored
                await self._report(shard, route.epoch, dead=False)
                continue
            try:
                answer = await self._around.ask(route.address, message)
            except Unreachable as lost:
                self._resent += 1
                await self._report(shard, route.epoch, dead=lost.dead)
                continue
            match answer:
                case Ack() | Values():
                    return answer
                case Evicted():
                    raise _WasEvicted
                case OutOfOrder():
                    raise StepscopeError(f"shard {shard} refused a message: {answer.why}")
                case Busy():
                    begun = time.monotonic_ns()
                    await asyncio.sleep(wait)
                    self._refused_ns += time.monotonic_ns() - begun
                    wait = min(2 * wait, _LONGEST_WAIT_S)
                case _:  # Stale
                    await self._report(shard, route.epoch, dead=False)

    async def _report(self, shard: int, epoch: int, *, dead: bool) -> None:
        found: Found = await self._ask_coordinator(ReportShard(shard=shard, epoch=epoch, dead=dead))
        self._routes = found.routes

    async def _ask_coordinator(self, message: Any) -> Any:
        wait = _FIRST_WAIT_S
        give_up = asyncio.get_running_loop().time() + self._give_up_s
        while True:
            try:
                answer = await self._around.ask(self._coordinator, message)
            except Unreachable as lost:
                if lost.dead or asyncio.get_running_loop().time() > give_up:
                    raise StepscopeError(
                        f"the parameter server's coordinator is gone ({lost}). Start the "
                        "server again. ParameterServer(..., checkpoint=FOLDER) resumes"
                    ) from None
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT_S)
                continue
            if isinstance(answer, Evicted):
                raise _WasEvicted
            return answer
