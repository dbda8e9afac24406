"""Talk to a child process that answers one line with one line, and end it with its own children."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time

_PIECE = 1 << 16
_MOST_ANSWER = 64 << 20


def ask_line(child: subprocess.Popen[bytes], line: bytes, limit_s: float) -> bytes:
    """Send one line, wait for one. TimeoutError when late, OSError when the child has died."""
    if child.stdin is None or child.stdout is None or child.stdin.closed:
        raise BrokenPipeError
    child.stdin.write(line)
    child.stdin.flush()
    pieces: list[bytes] = []
    end = time.monotonic() + limit_s
    size = 0
    while True:
        left = end - time.monotonic()
        if left <= 0 or not select.select([child.stdout], [], [], left)[0]:
            raise TimeoutError
        piece = os.read(child.stdout.fileno(), _PIECE)
        size += len(piece)
        if not piece or size > _MOST_ANSWER:
            raise BrokenPipeError
        pieces.append(piece)
        if piece.endswith(b"\n"):
            return b"".join(pieces)


def kill_group(leader: int) -> None:
    """A process that started a session of its own, with all that it started."""
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)


def end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the child's group, take its exit code, and close its pipes."""
    kill_group(child.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(10)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
