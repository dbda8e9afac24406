"""Keep a worker's copy of the parameters in step with the server: join, read, push, and go
on after failures.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from stepscope.errors import StepscopeError, UsageError
from stepscope.fix.server import messages as msg
from stepscope.fix.server.membership import Pull, Push, ServerEvent, worker_file
from stepscope.fix.server.messages import GradientPacker, as_tensor, unflatten
from stepscope.fix.server.ray_actors import EventLog, RayNetwork, ServerSetup

if TYPE_CHECKING:
    from stepscope.records.change_values import Consistency

# A worker: the parameters of a model here, kept in step with the server's.
#
# with server.worker(model) as w:
#     for step, batch in enumerate(data):
#         w.pull()
#         loss_of(model, batch).backward()
#         w.push(step)


class Worker:
    """Made by `server.worker()`. After an eviction it joins again by itself."""

    def __init__(
        self, coordinator: Any, parameters: Mapping[str, Any], rank: int | None = None
    ) -> None:
        self._parameters = dict(parameters)
        self._machine = _WorkerMachine()
        self._client = WorkerClient(coordinator, self._machine, rank=rank)
        self._loop = _LoopThread()
        self._setup: ServerSetup | None = None
        self._packers: list[GradientPacker] = []

    def __enter__(self) -> Self:
        self.join()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()

    def join(self) -> None:
        """Take part. `with` does it."""
        try:
            joined = self._loop.run(self._client.join())
            setup: ServerSetup = joined.setup
            self._setup = setup
            self._packers = [GradientPacker(setup.compression, layout) for layout in setup.layouts]
            for place in (place for layout in setup.layouts for place in layout.places):
                here = self._parameters.get(place.name)
                if here is None:
                    raise UsageError(
                        f"the server holds {place.name}, which this worker's model lacks"
                    )
                if tuple(here.shape) != place.shape or here.dtype != place.dtype:
                    raise UsageError(
                        f"{place.name} is {tuple(here.shape)} {here.dtype} in this worker's "
                        f"model and {place.shape} {place.dtype} on the server"
                    )
            self._loop.spawn(self._client.stay(setup.timing.worker_deadline_s / 4))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave: the others no longer wait for this worker. Further calls do nothing."""
        if self._loop.closed:
            return
        try:
            self._loop.run(asyncio.wait_for(self._client.leave(), 10.0))
        except Exception:
            pass
        finally:
            self._loop.close()
            self._machine.close()

    @property
    def rank(self) -> int:
        return self._client.joined.rank

    @property
    def clock(self) -> int:
        """Number of pushes that count, from the clock at which this worker joined."""
        return self._client.clock

    def pull(self) -> None:
        """Read the server's parameters into the model; waits as the consistency model asks."""
        setup = self._its_setup()
        flats = self._loop.run(self._client.pull(setup.consistency))
        if flats is None:
            return
        with torch.no_grad():
            for shard, flat in flats.items():
                unflatten(setup.layouts[shard], as_tensor(flat), self._parameters)

    def push(
        self,
        step: int | None = None,
        *,
        loss: float | None = None,
        settings: tuple[dict[str, Any], ...] | None = None,
        keep_gradients: bool = False,
    ) -> bool:
        """Send the gradients and clear them; returns when all shards have them. False if this
        worker was evicted meanwhile: the push does not count, and the next pull starts afresh.

        `step` and `loss` are for the records; `settings` are the optimizer's numbers from now on.
        """
        gradients = {name: one.grad for name, one in self._parameters.items()}
        packed = {shard: packer.pack(gradients) for shard, packer in enumerate(self._packers)}
        counted = self._loop.run(
            self._client.push(
                packed, settings=settings, step=step, loss=None if loss is None else float(loss)
            )
        )
        if not keep_gradients:
            for parameter in self._parameters.values():
                parameter.grad = None
        return bool(counted)

    def sync(self) -> None:
        """An explicit synchronisation point: wait until every worker has come to it. The next pull
        reads everything that was pushed before."""
        self._its_setup()
        self._loop.run(self._client.reach_sync_point())

    def _its_setup(self) -> ServerSetup:
        if self._setup is None or self._loop.closed:
            raise UsageError("this worker has not joined the server. Use `with server.worker()`")
        return self._setup


class _WorkerMachine(RayNetwork):
    """The process of a worker."""

    _log: EventLog | None = None

    def open_log(self, joined: msg.Joined) -> None:
        self.close()
        self._log = EventLog(joined.setup.folder, worker_file(joined.rank, joined.life))

    def log(self, event: ServerEvent) -> None:
        if self._log is not None:
            self._log.write(event)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


class _LoopThread:
    """The client's event loop, in a thread that also tells the server that this process lives."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="stepscope-worker", daemon=True
        )
        self._thread.start()
        self.closed = False

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.run(self._cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_others(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


# One worker's side of the protocol: join, read, push, and go on after failures.

_FIRST_WAIT_S = 0.01
_LONGEST_WAIT_S = 1.0


class WorkerSurroundings(Protocol):
    """The machine, as a worker's client needs it."""

    async def ask(self, address: Any, message: Any, timeout_s: float | None = None) -> Any:
        """Raises Unreachable."""

    async def fetch(self, flat: Any) -> Any:
        """The bytes that a shard published. Raises Unreachable."""

    def open_log(self, joined: msg.Joined) -> None:
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
        self._joined: msg.Joined | None = None
        self._routes: dict[int, Any] = {}
        self._may_push = False
        self._sync_points = 0
        self._read_at: int | None = None  # clock of the copy at hand
        self._read_ended_ns: int | None = None
        self._resent = 0
        self._refused_ns = 0

    @property
    def joined(self) -> msg.Joined:
        if self._joined is None:
            raise UsageError("this worker has not joined the server. Use `with server.worker()`")
        return self._joined

    async def join(self) -> msg.Joined:
        """Take part, from the clock that the coordinator says."""
        request = msg.Join(token=uuid.uuid4().hex, rank=self.rank)
        joined: msg.Joined = await self._ask_coordinator(request)
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
            await self._ask_coordinator(msg.Leave(member=member))

    async def stay(self, every_s: float) -> None:
        """Tell the coordinator that this process lives, for ever."""
        while True:
            await asyncio.sleep(every_s)
            if self._joined is not None:
                try:
                    await self._around.ask(
                        self._coordinator, msg.StillHere(member=self._joined.member), every_s
                    )
                except msg.Unreachable:
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
        young = consistency.mode == "weak" and (
            self._read_at is not None and self.clock - self._read_at < (consistency.bound or 0)
        )
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

    async def _wait_until_admitted(self) -> int | None:
        waited_for: int | None = None
        while True:
            request = msg.BeginClock(member=self.joined.member, clock=self.clock)
            answer = await self._ask_coordinator(request)
            if isinstance(answer, msg.MayRead):
                self._routes = answer.routes
                return answer.waited_for if answer.waited_for is not None else waited_for
            waited_for = answer.waiting_for

    async def _read_all(self) -> dict[int, tuple[msg.Values, Any]]:
        shards = list(self._routes)
        answers = await asyncio.gather(*(self._read(shard) for shard in shards))
        return dict(zip(shards, answers, strict=True))

    async def _read(self, shard: int) -> tuple[msg.Values, Any]:
        request = msg.ReadParameters(member=self.joined.member, clock=self.clock)
        while True:
            values: msg.Values = await self._ask_shard(shard, request)
            try:
                return values, await self._around.fetch(values.flat)
            except msg.Unreachable as lost:
                await self._report(shard, values.epoch, dead=lost.dead)

    def _gap(self, answers: list[msg.Values]) -> int:
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
                        msg.PushGradients(
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
            finish = msg.FinishClock(member=member, clock=clock, epochs=epochs)
            answer = await self._ask_coordinator(finish)
            if not isinstance(answer, msg.SendAgain):
                return
            missing, self._routes = answer.shards, answer.routes
            self._resent += len(missing)

    async def reach_sync_point(self) -> None:
        """Wait until every worker has come to its sync point; the next pull reads all of it."""
        self._sync_points += 1
        while True:
            request = msg.ReachSyncPoint(member=self.joined.member, number=self._sync_points)
            try:
                answer = await self._ask_coordinator(request)
            except _WasEvicted:
                await self.join()
                return
            if not isinstance(answer, msg.NotYet):
                self._read_at = None
                return

    # Asking

    async def _ask_shard(self, shard: int, message: msg.PushGradients | msg.ReadParameters) -> Any:
        """Until it answers; the coordinator knows where it is served now."""
        wait = _FIRST_WAIT_S
        while True:
            route = self._routes[shard]
            if route.address is None:  # it is being restored
                await self._report(shard, route.epoch, dead=False)
                continue
            try:
                answer = await self._around.ask(route.address, message)
            except msg.Unreachable as lost:
                self._resent += 1
                await self._report(shard, route.epoch, dead=lost.dead)
                continue
            match answer:
                case msg.Ack() | msg.Values():
                    return answer
                case msg.Evicted():
                    raise _WasEvicted
                case msg.OutOfOrder():
                    raise StepscopeError(f"shard {shard} refused a message: {answer.why}")
                case msg.Busy():
                    begun = time.monotonic_ns()
                    await asyncio.sleep(wait)
                    self._refused_ns += time.monotonic_ns() - begun
                    wait = min(2 * wait, _LONGEST_WAIT_S)
                case _:  # Stale
                    await self._report(shard, route.epoch, dead=False)

    async def _report(self, shard: int, epoch: int, *, dead: bool) -> None:
        found: msg.Found = await self._ask_coordinator(
            msg.ReportShard(shard=shard, epoch=epoch, dead=dead)
        )
        self._routes = found.routes

    async def _ask_coordinator(self, message: Any) -> Any:
        wait = _FIRST_WAIT_S
        give_up = asyncio.get_running_loop().time() + self._give_up_s
        while True:
            try:
                answer = await self._around.ask(self._coordinator, message)
            except msg.Unreachable as lost:
                if lost.dead or asyncio.get_running_loop().time() > give_up:
                    raise StepscopeError(
                        f"the parameter server's coordinator is gone ({lost}). Start the "
                        "server again. ParameterServer(..., checkpoint=FOLDER) resumes"
                    ) from None
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT_S)
                continue
            if isinstance(answer, msg.Evicted):
                raise _WasEvicted
            return answer
