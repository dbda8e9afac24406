"""A parameter server in one thread and in virtual time, with faults that a seed decides.

The product's own coordinator, shards and clients talk over a network that delays, repeats, reorders
and loses messages. Every parameter is a ledger: it has one number for each (rank, life, clock), to
which that push, and nothing else, adds one. What a worker reads is thus the list of updates in it.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from stepscope.fix.server.coordinator import Coordinator
from stepscope.fix.server.membership import ServerEvent, Timing
from stepscope.fix.server.messages import (
    Compression,
    GradientPacker,
    Layout,
    TakeCheckpoint,
    Unreachable,
    flatten,
    shard_layouts,
)
from stepscope.fix.server.shard import ShardServer
from stepscope.fix.server.shard_state import ShardRecipe, ShardSnapshot, make_recipe
from stepscope.fix.server.worker import WorkerClient
from stepscope.records.change_values import Consistency

RANKS, LIVES, CLOCKS = 4, 12, 60


class _JumpingSelector(selectors.DefaultSelector):
    """Does not wait: what is awaited comes at once, and the clock says how late it is."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits for somebody else")
        self.now += max(0.0, timeout)
        return []


def run_in_virtual_time(main: Coroutine[Any, Any, Any]) -> Any:
    """Run it in a thread: a browser that other tests opened keeps an event loop running here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_run_to_the_end, main).result()


def _run_to_the_end(main: Coroutine[Any, Any, Any]) -> Any:
    selector = _JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    loop.slow_callback_duration = float("inf")
    try:
        return loop.run_until_complete(asyncio.wait_for(main, 100_000))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(loop), return_exceptions=True))
        loop.close()


@dataclass
class Faults:
    """How often things go wrong."""

    lost: float = 0.03
    repeated: float = 0.1
    delay_s: float = 0.05
    worker_kills: int = 1
    shard_kills: int = 1
    cut_links: int = 0
    slow_shard: int | None = None
    slow_s: float = 0.5


@dataclass
class History:
    """What clients read and were told, and what was announced, in order."""

    entries: list[tuple[str, Any]] = field(default_factory=list)

    def add(self, kind: str, what: Any) -> int:
        self.entries.append((kind, what))
        return len(self.entries) - 1


class SimulatedNetwork:
    """Processes by name. Asking one takes time, and may fail in every way that a network has."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.processes: dict[str, Callable[[Any], Coroutine[Any, Any, Any]]] = {}
        self.dead: set[str] = set()
        self.cut_off: set[str] = set()
        self.answers: Counter[str] = Counter()
        self._tasks: dict[str, set[asyncio.Task[Any]]] = {}

    async def ask(self, asker: str, address: str, message: Any, timeout_s: float = 5.0) -> Any:
        await self._travel()
        if self.cut_off & {asker, address}:
            await asyncio.sleep(timeout_s)
            raise Unreachable("no answer")
        if self.random.random() < self.faults.repeated:
            self._deliver(address, message, late_s=self.random.random() * 2.0)
        task = self._deliver(address, message, late_s=0.0)
        if self.random.random() < self.faults.lost:
            await asyncio.sleep(timeout_s)
            raise Unreachable("the answer was lost")
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        if not done:
            raise Unreachable("no answer yet")
        if task.cancelled():
            raise Unreachable(f"{address} has ended", dead=True)
        await self._travel()
        self.answers[type(task.result()).__name__] += 1
        return task.result()

    def _deliver(self, address: str, message: Any, late_s: float) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(self._handle(address, message, late_s))
        tasks = self._tasks.setdefault(address, set())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def _handle(self, address: str, message: Any, late_s: float) -> Any:
        if late_s:
            await asyncio.sleep(late_s)
        if address in self.dead:
            raise asyncio.CancelledError
        return await self.processes[address](message)

    async def _travel(self) -> None:
        await asyncio.sleep(self.random.random() * self.faults.delay_s)

    def kill(self, address: str) -> None:
        self.dead.add(address)
        for task in list(self._tasks.get(address, ())):
            task.cancel()


class Surroundings:
    """Of one simulated process; all protocols of the product in one."""

    def __init__(self, world: SimulatedServer, name: str) -> None:
        self.world, self.name = world, name

    async def ask(self, address: Any, message: Any, timeout_s: float | None = None) -> Any:
        return await self.world.network.ask(self.name, address, message, timeout_s or 5.0)

    async def compute(self, function: Callable[[], Any]) -> Any:
        slow = self.world.network.faults.slow_shard
        if slow is not None and self.name.startswith(f"shard-{slow}-"):
            await asyncio.sleep(self.world.network.faults.slow_s)
        return function()

    def publish(self, flat: Any) -> Any:
        return flat.copy()

    async def fetch(self, flat: Any) -> Any:
        return flat

    def open_log(self, joined: Any) -> None:
        pass

    def log(self, event: ServerEvent) -> None:
        self.world.history.add("event", event)

    async def start_shard(
        self, shard: int, epoch: int, snapshot: ShardSnapshot | None, copy: int
    ) -> tuple[str, Any]:
        await asyncio.sleep(self.world.network.random.random())
        name = f"shard-{shard}-{len(self.world.network.processes)}-copy{copy}"
        server = ShardServer(
            self.world.recipes[shard],
            snapshot,
            Surroundings(self.world, name),
            epoch=epoch,
            coordinator="coordinator",
            queue_limit=self.world.queue_limit,
        )
        self.world.servers[name] = server
        self.world.network.processes[name] = server.ask
        return name, name

    def stop_shard(self, address: Any) -> None:
        self.world.network.kill(address)

    async def keep_cut(self, cut: int, counts: dict[str, int], shards: Any) -> None:
        self.world.history.add("cut", (cut, counts, [ledger_of(one.flat) for one in shards]))


def ledger_of(flat: Any) -> Any:
    size = RANKS * LIVES * CLOCKS
    return flat[: size * 8].view(np.float64).reshape(RANKS, LIVES, CLOCKS).copy()


class SimulatedServer:
    """Builds everything from real parts. `tensors` are the parameters, by default the ledgers."""

    def __init__(
        self,
        consistency: str,
        *,
        seed: int = 0,
        faults: Faults | None = None,
        replicas: int = 1,
        tensors: dict[str, Any] | None = None,
        optimizer: Callable[[Any], Any] | None = None,
        workers: int = RANKS,
        shards: int = 2,
        queue_limit: int = 64,
        compression: str | None = None,
    ) -> None:
        self.consistency = Consistency.parse(consistency)
        self.network = SimulatedNetwork(seed, faults or Faults())
        self.history = History()
        self.servers: dict[str, ShardServer] = {}
        self.queue_limit = queue_limit
        named = tensors or {
            f"ledger{shard}": torch.zeros(RANKS, LIVES, CLOCKS, dtype=torch.float64)
            for shard in range(shards)
        }
        parameters = {name: torch.nn.Parameter(one.clone()) for name, one in named.items()}
        recipe = make_recipe(optimizer or (lambda ps: torch.optim.SGD(ps, lr=1.0)), parameters)
        self.compression = Compression.parse(compression)
        self.layouts: list[Layout] = shard_layouts(parameters, shards)
        self.recipes = [
            ShardRecipe(
                shard=shard,
                layout=layout,
                optimizer=recipe,
                compression=self.compression,
                synchronous=self.consistency.synchronous,
            )
            for shard, layout in enumerate(self.layouts)
        ]
        first = [
            ShardSnapshot(flat=flatten(one, parameters).numpy(), optimizer={}, counts={})
            for one in self.layouts
        ]
        self._parts = (first, replicas, workers)

    async def start(self) -> None:
        first, replicas, workers = self._parts
        self.coordinator = Coordinator(
            self.consistency,
            first,
            Surroundings(self, "coordinator"),
            replicas=replicas,
            expected=workers,
            timing=Timing(worker_deadline_s=20.0, shard_deadline_s=6.0),
        )
        self.network.processes["coordinator"] = self.coordinator.ask
        await self.coordinator.start()
        self._watch = asyncio.ensure_future(self.coordinator.watch())

    def client(self, rank: int) -> WorkerClient:
        name = f"worker-{rank}"
        return WorkerClient("coordinator", Surroundings(self, name), rank=rank, give_up_s=1e9)

    def packers(self) -> list[GradientPacker]:
        return [GradientPacker(self.compression, layout) for layout in self.layouts]

    # Workers that write into the ledgers

    async def train(self, rank: int, steps: int, pace_s: float) -> None:
        """One life of a process: it may be cancelled anywhere."""
        client = self.client(rank)
        await client.join()
        stay = asyncio.ensure_future(client.stay(5.0))
        try:
            packers = self.packers()
            for _ in range(steps):
                if client.clock >= CLOCKS - 1 or client.joined.life >= LIVES - 1:
                    break
                await self.one_step(client, packers, pace_s)
            await client.leave()
        finally:
            stay.cancel()

    async def one_step(
        self, client: WorkerClient, packers: list[GradientPacker], pace_s: float
    ) -> None:
        begun = len(self.history.entries)
        flats = await client.pull(self.consistency)
        me = (client.joined.rank, client.joined.life, client.clock)
        if flats is not None:
            ledgers = {shard: ledger_of(flat) for shard, flat in flats.items()}
            self.history.add("pull", (begun, me, ledgers))
        await asyncio.sleep(pace_s * (0.5 + self.network.random.random()))
        ledger = torch.zeros(RANKS, LIVES, CLOCKS, dtype=torch.float64)
        ledger[me] = -1.0
        packed = {
            shard: packer.pack({f"ledger{shard}": ledger}) for shard, packer in enumerate(packers)
        }
        if await client.push(packed):
            self.history.add("acked", me)

    async def read_final(self) -> None:
        """What the shards hold in the end, as a newcomer reads it."""
        client = self.client(RANKS - 1)
        client.rank = None
        await client.join()
        flats = await client.pull(self.consistency)
        assert flats is not None
        self.history.add("final", {shard: ledger_of(flat) for shard, flat in flats.items()})
        await client.leave()

    async def checkpoint(self) -> None:
        client = self.client(RANKS - 1)
        await client._ask_coordinator(TakeCheckpoint())
