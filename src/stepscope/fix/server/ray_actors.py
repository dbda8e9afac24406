"""Run the server's coordinator and shards as Ray actors: the cluster, its nodes, the actors,
and the files they write.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from stepscope.errors import StepscopeError, UsageError
from stepscope.fix.server import messages as msg
from stepscope.fix.server.coordinator import Coordinator
from stepscope.fix.server.membership import (
    ServerEvent,
    ServerFacts,
    ShardFacts,
    ShardRestored,
    Timing,
    event_line,
    shard_file,
)
from stepscope.fix.server.messages import Compression, Layout
from stepscope.fix.server.shard import ShardServer
from stepscope.fix.server.shard_state import OptimizerRecipe, ShardRecipe, ShardSnapshot, save_cut
from stepscope.records.folders import COORDINATOR_FILE, SERVER_FILE, SERVER_FOLDER

if TYPE_CHECKING:
    from stepscope.records.change_values import Consistency

# Ray: the cluster, its nodes, and how a message travels to an actor.

NAMESPACE = "stepscope"
_ASK_S = 60.0
_QUIET = {"log_to_driver": False, "logging_level": "ERROR"}


def import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves this machine
    try:
        import ray
    except ImportError:
        raise UsageError("the parameter server needs Ray: pip install 'stepscope[ray]'") from None
    return ray


def connect_ray(address: str | None) -> tuple[Any, bool]:
    """Ray, connected; and whether a cluster was started here, which then has to be ended here.
    "local" always starts one."""
    ray = import_ray()
    if ray.is_initialized():
        return ray, False
    try:
        if address != "local":
            ray.init(address=address or "auto", namespace=NAMESPACE, **_QUIET)
            return ray, False
    except (ConnectionError, RuntimeError, ValueError) as error:
        named = address or os.environ.get("RAY_ADDRESS")
        if named:
            raise UsageError(f"no Ray cluster answers at {named}: {error}") from None
    ray.init(address="local", namespace=NAMESPACE, include_dashboard=False, **_QUIET)
    return ray, True


class RayNetwork:
    """Messages to actors that have a method `ask`."""

    def __init__(self) -> None:
        self._ray = import_ray()

    async def ask(self, address: Any, message: Any, timeout_s: float | None = None) -> Any:
        """Raises Unreachable; an exception that the other side raised is a defect."""
        lost = self._ray.exceptions
        try:
            answer = asyncio.wrap_future(address.ask.remote(message).future())
            return await asyncio.wait_for(answer, timeout_s or _ASK_S)
        except TimeoutError:
            raise msg.Unreachable("no answer in time") from None
        except lost.RayTaskError as error:
            raise StepscopeError(f"the parameter server failed: {error}") from None
        except lost.ActorDiedError as error:
            raise msg.Unreachable(str(error), dead=True) from None
        except lost.RayError as error:
            raise msg.Unreachable(str(error)) from None

    async def fetch(self, flat: Any) -> Any:
        """Bytes that came with the message, or lie in the object store."""
        if not isinstance(flat, self._ray.ObjectRef):
            return flat
        try:
            return await asyncio.wait_for(asyncio.wrap_future(flat.future()), _ASK_S)
        except TimeoutError:
            raise msg.Unreachable("the object store did not answer in time") from None
        except self._ray.exceptions.RayError as error:
            raise msg.Unreachable(str(error)) from None


# The files that a server's processes write into the run folder. They never disturb training.

_CAPTURE = "STEPSCOPE_CAPTURE"  # what `stepscope run` hands down


def run_folder() -> str | None:
    """The folder of the `stepscope run` that this process belongs to."""
    try:
        return str(json.loads(os.environ.get(_CAPTURE, ""))["folder"])
    except (ValueError, KeyError, TypeError):
        return None


class EventLog:
    """One process's file under together/; without a folder nothing is written."""

    def __init__(self, folder: str | None, name: str) -> None:
        self._file: TextIO | None = None
        if folder is None:
            return
        try:
            Path(folder, SERVER_FOLDER).mkdir(parents=True, exist_ok=True)
            path = Path(folder, SERVER_FOLDER, name)
            self._file = path.open("w", buffering=1, encoding="utf-8")
        except OSError as error:
            _warn(f"{folder}: events of the parameter server cannot be written: {error}")

    def write(self, event: ServerEvent) -> None:
        if self._file is None:
            return
        try:
            self._file.write(event_line(event))
        except (OSError, ValueError) as error:
            _warn(f"{self._file.name}: writing stopped: {error}")
            self._file = None

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def write_facts(setup: ServerSetup) -> None:
    """Write server.json into the run folder, if there is one."""
    if setup.folder is None:
        return
    facts = ServerFacts(
        mode=setup.consistency.mode,
        bound=setup.consistency.bound,
        shards=tuple(
            ShardFacts(shard=shard, tensors=len(layout.places), size_bytes=layout.size_bytes)
            for shard, layout in enumerate(setup.layouts)
        ),
        replicas=setup.replicas,
        optimizer=setup.optimizer.kind.__name__,
        compression=None if setup.compression.kind == "none" else setup.compression.words,
        deadline_s=setup.timing.worker_deadline_s,
        started_unix_ns=time.time_ns(),
    )
    folder = Path(setup.folder, SERVER_FOLDER)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SERVER_FILE).write_text(json.dumps(asdict(facts)), encoding="utf-8")
    except OSError as error:
        _warn(f"{setup.folder}: facts of the parameter server cannot be written: {error}")


def _warn(text: str) -> None:
    sys.stderr.write(f"stepscope: {text}\n")


# The server's Ray actors: thin shells around coordinator.py and shard.py.

_START_S = 180.0
_AVOID_S = 120.0  # a machine on which an actor was lost
_INLINE_BYTES = 64 * 1024  # the object store pays for larger arrays only


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSetup:
    """The settings that every process of the server gets."""

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


class _ShardMachine(RayNetwork):
    """The process of a shard."""

    def __init__(self, log: EventLog) -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(1)
        self.log = log.write

    async def compute(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def publish(self, flat: Any) -> Any:
        """One copy in the object store, which all readers of a machine map into their memory."""
        return self._ray.put(flat) if flat.nbytes > _INLINE_BYTES else flat.copy()


class ShardActor(ShardServer):
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
        super().__init__(
            recipe,
            snapshot,
            _ShardMachine(EventLog(setup.folder, shard_file(shard, number))),
            epoch=epoch,
            coordinator=coordinator,
            queue_limit=setup.queue_limit,
            patience_s=setup.timing.shard_deadline_s,
        )


class CoordinatorActor(RayNetwork):
    """Starts the shards and answers workers; surroundings of the Coordinator inside it."""

    def __init__(self, setup: ServerSetup, first: Sequence[ShardSnapshot]) -> None:
        super().__init__()
        self._setup = setup
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
            await self._coordinator.ask(msg.TakeCheckpoint())

    # Surroundings of the coordinator

    async def start_shard(
        self, shard: int, epoch: int, snapshot: ShardSnapshot | None, copy: int
    ) -> tuple[str, Any]:
        """Copies of a shard go to different machines while there are enough."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for node in self._candidates(shard + copy):
            self._actors += 1
            number = self._actors
            actor = self._ray.remote(ShardActor).options(
                # Ray places an actor that asks for nothing at random, whatever the strategy says.
                num_cpus=0,
                memory=1,
                # Elsewhere, if the node is gone by then.
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=True),
            )
            me = self._ray.get_runtime_context().current_actor
            address = actor.remote(self._setup, shard, snapshot, epoch, Answering(me), number)
            try:
                await self.ask(address, msg.Ping(), _START_S)
            except msg.Unreachable:
                self._avoid[node] = time.monotonic()
                self._ray.kill(address)
                continue
            self._nodes[address] = node
            return f"shard-{shard}-{number}", address
        raise msg.Unreachable("no machine of the cluster starts a shard")

    def _candidates(self, first: int) -> list[str]:
        """Return the living nodes from this number on, those that lost an actor at the end."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        head = "node:__internal_head__"
        alive.sort(key=lambda node: (head not in node["Resources"], node["NodeID"]))
        nodes = [node["NodeID"] for node in alive]
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
            _warn(f"{self._setup.checkpoint}: not saved: {error}")

    def log(self, event: ServerEvent) -> None:
        if isinstance(event, ShardRestored):
            _warn(event.detail)
        self._log.write(event)


class Answering:
    """The coordinator's address: its actor's method `answer` under the name that all others use."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @property
    def ask(self) -> Any:
        return self._actor.answer
