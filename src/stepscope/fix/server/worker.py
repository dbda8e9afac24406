"""A worker: the parameters of a model here, kept in step with the server's.

with server.worker(model) as w:
    for step, batch in enumerate(data):
        w.pull()
        loss_of(model, batch).backward()
        w.push(step)
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import torch

from stepscope.errors import UsageError
from stepscope.fix.server.client import WorkerClient
from stepscope.fix.server.compression import GradientPacker, as_tensor
from stepscope.fix.server.event_log import EventLog
from stepscope.fix.server.layout import unflatten
from stepscope.fix.server.ray_cluster import RayNetwork
from stepscope.records.together import worker_file

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping
    from typing import Self

    from stepscope.fix.server.layout import Layout
    from stepscope.fix.server.messages import Joined
    from stepscope.fix.server.ray_actors import ServerSetup
    from stepscope.records.together import ServerEvent


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
            self._setup = joined.setup
            self._packers = [
                GradientPacker(joined.setup.compression, layout) for layout in joined.setup.layouts
            ]
            for layout in joined.setup.layouts:
                _check_same(layout, self._parameters)
            deadline_s = joined.setup.timing.worker_deadline_s
            self._loop.spawn(self._client.stay(deadline_s / 4))
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


class _WorkerMachine:
    """What the client needs of the process it runs in."""

    def __init__(self) -> None:
        network = RayNetwork()
        self.ask, self.fetch = network.ask, network.fetch
        self._log: EventLog | None = None

    def open_log(self, joined: Joined) -> None:
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
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _check_same(layout: Layout, parameters: Mapping[str, Any]) -> None:
    for place in layout.places:
        here = parameters.get(place.name)
        if here is None:
            raise UsageError(f"the server holds {place.name}, which this worker's model lacks")
        if tuple(here.shape) != place.shape or here.dtype != place.dtype:
            raise UsageError(
                f"{place.name} is {tuple(here.shape)} {here.dtype} in this worker's model and "
                f"{place.shape} {place.dtype} on the server"
            )
