"""The web server: a port of this machine alone, from the first request to Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from typing import TYPE_CHECKING

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp

HOST = "127.0.0.1"
PORT = 8763
_PORTS_TRIED = 50
_PATIENCE_S = 2  # for answers under way when the server stops


def open_port(port: int) -> socket.socket:
    """A listening socket; 0 is any free port. UsageError if it is in use, with one that is free."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} of {HOST} is in use: another `stepscope serve`, or another program",
                f"port {_free_port(port)} is free: stepscope serve --port {_free_port(port)}",
            ) from None
        raise UsageError(f"port {port} cannot be opened: {error.strerror}") from None
    return listener


def _free_port(after: int) -> int:
    for port in range(after + 1, min(after + _PORTS_TRIED, 65536)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return port
    return 0


def serve_until_stopped(
    app: ASGIApp, listener: socket.socket, on_start: Callable[[], None]
) -> None:
    """Returns after Ctrl-C or a signal to end."""
    import uvicorn

    class AnnouncedServer(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_start()

    config = uvicorn.Config(
        app,
        log_level="error" if os.environ.get("STEPSCOPE_DEBUG") else "critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_PATIENCE_S,
        timeout_keep_alive=30,
        lifespan="on",
    )
    with contextlib.suppress(KeyboardInterrupt):
        AnnouncedServer(config).run(sockets=[listener])
