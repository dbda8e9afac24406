"""Child processes that do the heavy work for `serve`: one job at a time each, killed when late."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

from stepscope.errors import NotCapturedError, StepscopeError, UnreadableInputError, UsageError
from stepscope.records.figures import duration
from stepscope.ui.own_python import own_python

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_JOBS = 200  # then a new process: memory that readers took goes back
_PIECE = 1 << 16
_MOST_ANSWER = 64 << 20
_ERRORS = {2: UsageError, 3: UnreadableInputError, 4: NotCapturedError}


class WorkerError(StepscopeError):
    """The worker did not answer: it was killed after its limit, or has died."""


class WorkerProcess:
    """Starts its child when the first job comes, and again after a death."""

    def __init__(self, *options: str) -> None:
        self._options = options
        self._child: subprocess.Popen[bytes] | None = None
        self._jobs = 0
        self._closed = False
        self._lock = threading.Lock()

    def ask(self, limit_s: float, /, **job: Any) -> dict[str, Any]:
        """The job's result. StepscopeError if it failed, took too long or was stopped."""
        with self._lock:
            child = self._running_child()
            line = json.dumps(job).encode("ascii") + b"\n"
            try:
                text = _exchange(child, line, limit_s)
            except TimeoutError:
                self._kill()
                limit = duration(limit_s * 1e9)
                raise WorkerError(f"stopped after {limit}, the limit for one job") from None
            except (OSError, ValueError):  # a closed pipe is a ValueError
                self._kill()
                raise WorkerError(
                    "the process that reads this run was killed, perhaps because memory ran out"
                ) from None
            self._jobs += 1
            if self._jobs >= _MOST_JOBS:
                self._kill()
        return read_answer(text)

    def close(self) -> None:
        """A job that is under way ends in a WorkerError."""
        self._closed = True
        if (child := self._child) is not None:
            _end(child)

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise WorkerError("serve is stopping")
        if self._child is None or self._child.poll() is not None:
            self._kill()
            self._child = subprocess.Popen(
                own_python("stepscope.ui.serve_worker", *self._options),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that it can be ended with its own children
                bufsize=0,
            )
            self._jobs = 0
        return self._child

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            _end(child)


def read_answer(text: bytes) -> dict[str, Any]:
    """The result in a worker's line, or its error raised."""
    answer = json.loads(text)
    if b"\\udc" in text:  # a name that is no UTF-8: pages cannot hold what stands for its bytes
        answer = json.loads(json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace"))
    if "error" in answer:
        raise _ERRORS.get(answer["exit_code"], StepscopeError)(answer["error"])
    result: dict[str, Any] = answer["result"]
    return result


def _exchange(child: subprocess.Popen[bytes], line: bytes, limit_s: float) -> bytes:
    """Send one line, wait for one. TimeoutError when late, OSError when the child has died."""
    if child.stdin is None or child.stdout is None:
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


def _end(child: subprocess.Popen[bytes]) -> None:
    """With the processes that it started to read traces in."""
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(10)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


class WorkerPool:
    """A few workers for what people wait for; further requests wait their turn, within a limit."""

    def __init__(self, size: int, most_waiting: int) -> None:
        self._workers = [WorkerProcess() for _ in range(size)]
        self._idle: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._places = threading.BoundedSemaphore(size + most_waiting)

    @contextlib.contextmanager
    def worker(self) -> Iterator[WorkerProcess]:
        """The next free worker. WorkerError if too many wait already."""
        if not self._places.acquire(blocking=False):
            raise WorkerError("too many requests wait already: try again in a moment")
        try:
            chosen = self._idle.get()
            try:
                yield chosen
            finally:
                self._idle.put(chosen)
        finally:
            self._places.release()

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
