"""Train with a parameter server on Ray: strong, bounded, eventual or weak consistency.

    from stepscope.fix.server import ParameterServer

shard_state.py says how updates are applied. coordinator.py, shard.py and worker.py are the three
parties. None of them knows Ray: ray_actors.py and worker.py run them on a cluster, tests run them
in virtual time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.fix.server.parameter_server import ParameterServer as ParameterServer
    from stepscope.fix.server.parameter_server import ServedOptimizer as ServedOptimizer
    from stepscope.fix.server.parameter_server import ServerConnection as ServerConnection
    from stepscope.fix.server.parameter_server import connect as connect
    from stepscope.fix.server.worker import Worker as Worker

_PLACES = {
    "ParameterServer": "parameter_server",
    "ServerConnection": "parameter_server",
    "connect": "parameter_server",
    "ServedOptimizer": "parameter_server",
    "Worker": "worker",
}


def __getattr__(name: str) -> Any:
    """Importing the package costs nothing."""
    if name not in _PLACES:
        raise AttributeError(f"module 'stepscope.fix.server' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"stepscope.fix.server.{_PLACES[name]}"), name)
