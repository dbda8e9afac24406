"""Start the server on standard input and output, or on a port of this machine."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, NoReturn

from pygls.exceptions import JsonRpcInvalidParams

from stepscope.errors import UsageError
from stepscope.ui.lsp.features import make_server
from stepscope.ui.say import say

if TYPE_CHECKING:
    from stepscope.ui.lsp.work_room import WorkRoom

_LOCAL = "127.0.0.1"


def serve_stdio(room: WorkRoom | None = None) -> NoReturn:
    """The protocol gets descriptors of its own: whatever else is printed goes to stderr."""
    _prepare()
    source, target = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    make_server(room).start_io(os.fdopen(source, "rb"), os.fdopen(target, "wb"))
    _leave()


def serve_tcp(port: int) -> NoReturn:
    """One editor, then the server ends."""
    _prepare()
    try:
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((_LOCAL, port))
    except OSError as error:
        raise UsageError(f"port {port} cannot be used: {error.strerror}; choose another") from None
    say(f"listening on {_LOCAL}:{port}")
    make_server().start_tcp(_LOCAL, port)
    _leave()


def _prepare() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_without_traceback)
    logging.basicConfig(handlers=[handler], level=logging.ERROR)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _without_traceback(record: logging.LogRecord) -> bool:
    """For a request that makes no sense: its answer says so, and nothing of ours is wrong."""
    if record.exc_info and isinstance(record.exc_info[1], JsonRpcInvalidParams):
        record.exc_info = None
    return True


def _leave() -> NoReturn:
    """The editor is gone. A thread may still wait for input: do not wait for it."""
    sys.stderr.flush()
    os._exit(0)
