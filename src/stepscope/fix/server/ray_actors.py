"""The server's Ray actors: thin shells around coordinator.py and shard.py."""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.fix.server.checkpoint_files import save_cut
from stepscope.fix.server.coordinator import Coordinator
from stepscope.fix.server.event_log import EventLog
from stepscope.fix.server.messages import Ping, TakeCheckpoint, Unreachable
from stepscope.fix.server.ray_cluster import RayNetwork, import_ray, node_ids, on_node
from stepscope.fix.server.shard import ShardServer
from stepscope.fix.server.shard_state import ShardRecipe
from stepscope.records.together import ShardRestored, shard_file
from stepscope.records.together_folder import COORDINATOR_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.fix.server.compression import Compression
    from stepscope.fix.server.layout import Layout
    from stepscope.fix.server.optimizer_recipe import OptimizerRecipe
    from stepscope.fix.server.shard_directory import Timing
    from stepscope.fix.server.shard_state import ShardSnapshot
    from stepscope.records.consistency import Consistency
    from stepscope.records.together import ServerEvent

_START_S = 180.0
_AVOID_S = 120.0  # a machine on which an actor was lost
_INLINE_BYTES = 64 * 1024  # the object store pays for larger arrays only


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSetup:
    """What every process of the server is told."""

    consistency: Consistency
    compression: Compression
    layouts: tuple[Layout, ...]
    optimizer: OptimizerRecipe
    replicas: int
    workers: int
    timing: Timing
    queue_limit: int
    folder: str | None  # the run folder
    checkpoint: str | None
    checkpoint_every_s: float | None
    first_cut: int = 0  # cuts that an earlier server left in the checkpoint folder


class _ShardMachine:
    """What a shard needs of the process it runs in."""

    def __init__(self, log: EventLog) -> None:
        self._ray = import_ray()
        self._network = RayNetwork()
        self._thread = ThreadPoolExecutor(1)
        self.log = log.write
        self.ask = self._network.ask

    async def compute(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def publish(self, flat: Any) -> Any:
        """One copy in the object store, which all readers of a machine map into their memory."""
        return self._ray.put(flat) if flat.nbytes > _INLINE_BYTES else flat.copy()


class ShardActor:
    """One actor of a shard: a primary or, without a snapshot, a backup."""

    def __init__(
        self,
        setup: ServerSetup,
        shard: int,
        snapshot: ShardSnapshot | None,
        epoch: int,
        coordinator: Any,
        number: int,
    ) -> None:
        recipe = ShardRecipe(
            shard=shard,
            layout=setup.layouts[shard],
            optimizer=setup.optimizer,
            compression=setup.compression,
            synchronous=setup.consistency.synchronous,
        )
        self._server = ShardServer(
            recipe,
            snapshot,
            _ShardMachine(EventLog(setup.folder, shard_file(shard, number))),
            epoch=epoch,
            coordinator=coordinator,
            queue_limit=setup.queue_limit,
            patience_s=setup.timing.shard_deadline_s,
        )

    async def ask(self, message: Any) -> Any:
        return await self._server.ask(message)


class CoordinatorActor:
    """Starts the shards and answers workers; surroundings of the Coordinator inside it."""

    def __init__(self, setup: ServerSetup, first: Sequence[ShardSnapshot]) -> None:
        self._ray = import_ray()
        self._setup = setup
        self._network = RayNetwork()
        self._log = EventLog(setup.folder, COORDINATOR_FILE)
        self._actors = 0
        self._nodes: dict[Any, str] = {}  # where each actor was started
        self._avoid: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._coordinator = Coordinator(
            setup.consistency,
            first,
            self,
            replicas=setup.replicas,
            expected=setup.workers,
            timing=setup.timing,
            setup=setup,
        )

    async def start(self) -> None:
        """Returns when all shards are there."""
        await self._coordinator.start()
        self._tasks.append(asyncio.ensure_future(self._coordinator.watch()))
        if self._setup.checkpoint_every_s is not None:
            self._tasks.append(asyncio.ensure_future(self._save(self._setup.checkpoint_every_s)))

    async def answer(self, message: Any) -> Any:
        return await self._coordinator.ask(message)

    async def setup(self) -> ServerSetup:
        return self._setup

    async def stop(self) -> None:
        """End every shard; the caller then ends this actor."""
        for task in self._tasks:
            task.cancel()
        for address in list(self._nodes):
            self._ray.kill(address)
        self._log.close()

    async def _save(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            await self._coordinator.ask(TakeCheckpoint())

    # Surroundings of the coordinator

    async def ask(self, address: Any, message: Any, timeout_s: float | None = None) -> Any:
        return await self._network.ask(address, message, timeout_s)

    async def start_shard(
        self, shard: int, epoch: int, snapshot: ShardSnapshot | None, copy: int
    ) -> tuple[str, Any]:
        """Copies of a shard go to different machines while there are enough."""
        for node in self._candidates(shard + copy):
            self._actors += 1
            number = self._actors
            actor = self._ray.remote(ShardActor).options(
                # Ray places an actor that asks for nothing at random, whatever the strategy says.
                num_cpus=0,
                memory=1,
                scheduling_strategy=on_node(node),
            )
            me = self._ray.get_runtime_context().current_actor
            address = actor.remote(self._setup, shard, snapshot, epoch, Answering(me), number)
            try:
                await self._network.ask(address, Ping(), _START_S)
            except Unreachable:
                self._avoid[node] = time.monotonic()
                self._ray.kill(address)
                continue
            self._nodes[address] = node
            return f"shard-{shard}-{number}", address
        raise Unreachable("no machine of the cluster starts a shard")

    def _candidates(self, first: int) -> list[str]:
        nodes = node_ids(self._ray)
        turned = [nodes[(first + place) % len(nodes)] for place in range(len(nodes))]
        now = time.monotonic()
        return sorted(turned, key=lambda node: now - self._avoid.get(node, -_AVOID_S) < _AVOID_S)

    def stop_shard(self, address: Any) -> None:
        node = self._nodes.pop(address, None)
        if node is not None:
            self._avoid[node] = time.monotonic()
        self._ray.kill(address)

    async def keep_cut(
        self, cut: int, counts: dict[str, int], shards: Sequence[ShardSnapshot]
    ) -> None:
        """A full disk is reported and does not end the training."""
        del counts
        if self._setup.checkpoint is None:
            return
        number = self._setup.first_cut + cut
        try:
            folder = Path(self._setup.checkpoint)
            await asyncio.to_thread(save_cut, folder, number, self._setup.layouts, shards)
        except OSError as error:
            sys.stderr.write(f"stepscope: {self._setup.checkpoint}: not saved: {error}\n")

    def log(self, event: ServerEvent) -> None:
        if isinstance(event, ShardRestored):
            sys.stderr.write(f"stepscope: {event.detail}\n")
        self._log.write(event)


class Answering:
    """The coordinator's address: its actor's method `answer` under the name that all others use."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @property
    def ask(self) -> Any:
        return self._actor.answer
