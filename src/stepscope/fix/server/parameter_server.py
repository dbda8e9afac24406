"""Start or reach a parameter server for a model on a Ray cluster, and train an ordinary loop
through it.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch

from stepscope.errors import UsageError
from stepscope.fix.server import messages as msg
from stepscope.fix.server.membership import CheckpointCut, Timing
from stepscope.fix.server.messages import Compression, flatten, shard_layouts
from stepscope.fix.server.ray_actors import (
    NAMESPACE,
    Answering,
    CoordinatorActor,
    ServerSetup,
    connect_ray,
    import_ray,
    run_folder,
    write_facts,
)
from stepscope.fix.server.shard_state import (
    ShardSnapshot,
    group_settings,
    load_cut,
    make_recipe,
    saved_cuts,
)
from stepscope.fix.server.worker import Worker
from stepscope.records.change_values import Consistency

# An ordinary training loop as a worker: its optimizer's step goes to the server.


class ServedOptimizer(torch.optim.Optimizer):
    """`step` pushes the gradients, and pulls parameters for the next step.

    It has the parameter groups of the optimizer that it stands for: a schedule may be built on
    either, and the server uses the learning rate of the moment.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, worker: Worker) -> None:
        self.worker = worker
        super().__init__(optimizer.param_groups, optimizer.defaults)
        worker.pull()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Like any optimizer's; a loss that `closure` returns is kept in the run folder."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.worker.push(
            loss=None if loss is None else float(loss),
            settings=group_settings(self),
            keep_gradients=True,
        )
        self.worker.pull()
        return loss

    def close(self) -> None:
        """The training is over: the others no longer wait for this worker."""
        self.worker.close()


# The front door: a parameter server for a model, on a Ray cluster.
#
#     with ParameterServer(model, optimizer=SGD(model.parameters(), lr=0.1),
#                          consistency="bounded:3") as server:
#         with server.worker() as w:
#             w.pull(); loss_of(model, batch).backward(); w.push()
#
# Workers are this process, Ray actors that were given `server`, or processes that call `connect`.

_END_S = 10.0


class ServerConnection:
    """A server that runs somewhere on the cluster, by its name. It can be sent to Ray actors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._actor: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ServerConnection, (self.name,)

    def worker(self, model: Any, rank: int | None = None) -> Worker:
        """This process as a worker. Without `rank`, the lowest free one is taken."""
        return Worker(Answering(self._its_actor()), named_parameters(model), rank)

    def wrap(self, model: Any, optimizer: Any, rank: int | None = None) -> ServedOptimizer:
        """The optimizer for an ordinary loop; the loop itself stays as it is."""
        worker = self.worker(model, rank)
        worker.join()
        return ServedOptimizer(optimizer, worker)

    def checkpoint(self) -> CheckpointCut:
        """Save all shards at one cut, while workers go on."""
        cut: CheckpointCut = self._ask(msg.TakeCheckpoint())
        return cut

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All parameters at one cut; buffers stay with each worker's model."""
        setup: ServerSetup = import_ray().get(self._its_actor().setup.remote())
        return {
            name: view.clone()
            for layout, shard in zip(setup.layouts, self._ask(msg.ReadState()).shards, strict=True)
            for name, view in layout.views(torch.tensor(shard.flat)).items()
        }

    def _ask(self, message: Any) -> Any:
        return import_ray().get(self._its_actor().answer.remote(message))

    def _its_actor(self) -> Any:
        if self._actor is None:
            try:
                self._actor = import_ray().get_actor(self.name, namespace=NAMESPACE)
            except ValueError:
                raise UsageError(
                    f'no parameter server named "{self.name}" runs on this Ray cluster. It '
                    "ended, or this process is connected to another cluster"
                ) from None
        return self._actor


class ParameterServer(ServerConnection):
    """Start the server, and end it in `close` or at the end of `with`.

    model         an nn.Module, or its parameters by name
    optimizer     a torch optimizer of these parameters, or a function that makes one of a list
    shards        actors that share the parameters, balanced by bytes
    consistency   "strong", "bounded:3", "eventual" or "weak:8"
    replicas      backups of each shard, on other machines if there are any
    compression   None, "bf16" or "top-k:0.01"
    workers       the first clock begins when so many have joined; 0: at once
    checkpoint    a folder for checkpoints; the last one in it is resumed
    run           the run folder for events; under `stepscope run`, its folder
    """

    def __init__(
        self,
        model: Any,
        *,
        optimizer: Any,
        shards: int = 2,
        consistency: str = "strong",
        replicas: int = 0,
        compression: str | None = None,
        workers: int = 0,
        name: str | None = None,
        address: str | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every_s: float | None = None,
        run: str | os.PathLike[str] | None = None,
        worker_deadline_s: float = 30.0,
        shard_deadline_s: float = 10.0,
        queue_limit: int = 64,
    ) -> None:
        super().__init__(name or f"parameter-server-{uuid.uuid4().hex[:8]}")
        self._model = model
        self._closed = False
        parameters = named_parameters(model)
        layouts = tuple(shard_layouts(parameters, shards))
        saved = saved_cuts(Path(checkpoint)) if checkpoint is not None else []
        for option, value in (("replicas", replicas), ("workers", workers)):
            if value < 0:
                raise UsageError(f"{option}={value}: must be 0 or more")
        setup = ServerSetup(
            consistency=Consistency.parse(consistency),
            compression=Compression.parse(compression),
            layouts=layouts,
            optimizer=make_recipe(optimizer, parameters),
            replicas=replicas,
            workers=workers,
            timing=Timing(worker_deadline_s=worker_deadline_s, shard_deadline_s=shard_deadline_s),
            queue_limit=queue_limit,
            folder=str(Path(run).absolute()) if run is not None else run_folder(),
            checkpoint=str(Path(checkpoint).absolute()) if checkpoint is not None else None,
            checkpoint_every_s=checkpoint_every_s,
            first_cut=int(saved[-1].name.removeprefix("cut-")) if saved else 0,
        )
        if saved:
            first = load_cut(saved[-1], layouts)
        else:
            flats = [flatten(layout, parameters).numpy() for layout in layouts]
            first = [ShardSnapshot(flat=flat, optimizer={}, counts={}) for flat in flats]
        self._ray, self._own_cluster = connect_ray(address)
        try:
            self._start(setup, first)
        except BaseException:
            self.close()
            raise
        write_facts(setup)

    def _start(self, setup: ServerSetup, first: list[ShardSnapshot]) -> None:
        actor = self._ray.remote(CoordinatorActor).options(
            name=self.name,
            namespace=NAMESPACE,
            num_cpus=0,
            # On the head node: without it there is no cluster either.
            resources={"node:__internal_head__": 0.001},
            max_concurrency=10_000,
        )
        self._actor = actor.remote(setup, first)
        try:
            self._ray.get(self._actor.start.remote())
        except self._ray.exceptions.RayError as error:
            raise UsageError(
                "the parameter server does not start on this Ray cluster. Every machine "
                "needs the same stepscope and torch as this one "
                f"({str(error).strip().splitlines()[-1]})"
            ) from None

    def worker(self, model: Any = None, rank: int | None = None) -> Worker:
        """This process as a worker, with the model given here or to the server."""
        return super().worker(self._model if model is None else model, rank)

    def close(self) -> None:
        """End all actors, and the cluster if it was started for this server."""
        if self._closed:
            return
        self._closed = True
        if self._actor is not None and self._ray.is_initialized():
            with contextlib.suppress(Exception):
                self._ray.get(self._actor.stop.remote(), timeout=_END_S)
            with contextlib.suppress(Exception):
                self._ray.kill(self._actor)
        if self._own_cluster:
            self._ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(name: str, address: str | None = None) -> ServerConnection:
    """Connect to a server by its name, from any process on a machine of the cluster."""
    connect_ray(address)
    connection = ServerConnection(name)
    connection._its_actor()
    return connection


def named_parameters(model: Any) -> dict[str, Any]:
    """Parameters by name. UsageError for what a server cannot hold."""
    if isinstance(model, torch.nn.Module):
        parameters = dict(model.named_parameters())
    elif isinstance(model, dict):
        parameters = {
            name: one if isinstance(one, torch.nn.Parameter) else torch.nn.Parameter(one)
            for name, one in model.items()
        }
    else:
        raise UsageError(f"{type(model).__name__}: give an nn.Module or tensors by name")
    for name, one in parameters.items():
        plain = type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout == torch.strided
        if not plain or one.is_meta:
            raise UsageError(
                f"{name} is a {type(one).__name__} on {one.device}. A parameter server holds "
                "ordinary, dense tensors with values"
            )
    return parameters
