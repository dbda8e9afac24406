"""Ray: the cluster, its nodes, and how a message travels to an actor."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from stepscope.errors import StepscopeError, UsageError
from stepscope.fix.server.messages import Unreachable

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
            raise Unreachable("no answer in time") from None
        except lost.RayTaskError as error:
            raise StepscopeError(f"the parameter server failed: {error}") from None
        except lost.ActorDiedError as error:
            raise Unreachable(str(error), dead=True) from None
        except lost.RayError as error:
            raise Unreachable(str(error)) from None

    async def fetch(self, flat: Any) -> Any:
        """Bytes that came with the message, or lie in the object store."""
        if not isinstance(flat, self._ray.ObjectRef):
            return flat
        try:
            return await asyncio.wait_for(asyncio.wrap_future(flat.future()), _ASK_S)
        except TimeoutError:
            raise Unreachable("the object store did not answer in time") from None
        except self._ray.exceptions.RayError as error:
            raise Unreachable(str(error)) from None


def node_ids(ray: Any) -> list[str]:
    """Living nodes, the head node first."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeID"]))
    return [node["NodeID"] for node in alive]


def on_node(node: str) -> Any:
    """Where an actor should be started; elsewhere if the node is gone by then."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=node, soft=True)
