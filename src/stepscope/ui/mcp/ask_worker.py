"""Ask worker processes: several questions at once, with progress, and ended when cancelled."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE
from types import TracebackType
from typing import Any

import anyio
import msgspec
from anyio.abc import Process

from stepscope.errors import StepscopeError, UnreadableInputError
from stepscope.text.figures import percent, size
from stepscope.ui.jobs.environment import own_python
from stepscope.ui.jobs.process import kill_group

_WORKERS = 2
_HEARTBEAT_S = 1.0
_LONGEST_LINE = 1 << 20

# Tells a client that waits the seconds so far, and what is being done.
Report = Callable[[float, str], Awaitable[None]]


class Workers:
    """A few worker processes, each started when it is first needed. Questions wait their turn."""

    def __init__(self, roots: Sequence[Path]) -> None:
        command = own_python("stepscope.ui.mcp.worker", *(os.fsencode(r).hex() for r in roots))
        self._workers = [_Worker(command) for _ in range(_WORKERS)]

    async def __aenter__(self) -> Workers:
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            for worker in self._workers:
                await worker.end()

    async def ask(
        self,
        tool: str,
        arguments: dict[str, Any],
        report: Report,
        beside: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return one page, with what stands beside. Cancelling ends the worker, and its work."""
        began = time.monotonic()
        doing = tool
        failed: StepscopeError | None = None
        page: dict[str, Any] = {}

        async def beat() -> None:
            while True:
                await anyio.sleep(_HEARTBEAT_S)
                await report(time.monotonic() - began, doing)

        async def read(done: int, total: int) -> None:
            nonlocal doing
            doing = f"{tool}: read {percent(done / total if total else 1)} of {size(total)}"

        async with anyio.create_task_group() as group:
            group.start_soon(beat)
            try:
                job = {"tool": tool, "arguments": arguments, "beside": beside}
                page = await self._chosen(tool, arguments).ask(job, read)
            except StepscopeError as error:  # a group would wrap it
                failed = error
            group.cancel_scope.cancel()
        if failed is not None:
            raise failed
        return page

    def _chosen(self, tool: str, arguments: dict[str, Any]) -> _Worker:
        """Return the worker that keeps this answer, or a free one for a new question."""
        about = {name: arguments[name] for name in arguments if name not in ("cursor", "part")}
        key = msgspec.json.encode([tool, about], order="deterministic")
        keeper = next((worker for worker in self._workers if key in worker.answered), None)
        free = [worker for worker in self._workers if not worker.waiting]
        if keeper is None or (keeper.waiting and not arguments.get("cursor") and free):
            keeper = min(self._workers, key=lambda worker: worker.waiting)
        keeper.answered = [key, *keeper.answered[:2]]
        return keeper


class _Worker:
    """One child process, started again after a death."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._child: Process | None = None
        self._lock = anyio.Lock()
        self._rest = b""
        self.waiting = 0
        self.answered: list[bytes] = []  # the last questions, the newest first

    async def ask(
        self, job: dict[str, Any], read: Callable[[int, int], Awaitable[None]]
    ) -> dict[str, Any]:
        self.waiting += 1
        try:
            async with self._lock:
                return await self._ask(job, read)
        finally:
            self.waiting -= 1

    async def _ask(
        self, job: dict[str, Any], read: Callable[[int, int], Awaitable[None]]
    ) -> dict[str, Any]:
        child = await self._running()
        assert child.stdin is not None
        try:
            await child.stdin.send(msgspec.json.encode(job) + b"\n")
            while True:
                message = msgspec.json.decode(await self._line(child))
                if "page" in message:
                    page: dict[str, Any] = message["page"]
                    return page
                await read(*message["progress"])
        except (anyio.EndOfStream, anyio.BrokenResourceError, msgspec.DecodeError):
            await self.end()
            raise UnreadableInputError(
                "the process that reads this run was killed, perhaps because memory ran out",
                "ask about fewer ranks, or on a machine with more memory",
            ) from None
        except BaseException:  # cancelled: the child works on what nobody waits for
            with anyio.CancelScope(shield=True):
                await self.end()
            raise

    async def _line(self, child: Process) -> bytes:
        assert child.stdout is not None
        while b"\n" not in self._rest:
            self._rest += await child.stdout.receive()
            if len(self._rest) > _LONGEST_LINE:
                raise anyio.EndOfStream
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    async def _running(self) -> Process:
        if self._child is None or self._child.returncode is not None:
            await self.end()
            self._child = await anyio.open_process(
                self._command, stdin=PIPE, stdout=PIPE, stderr=sys.stderr, start_new_session=True
            )
        return self._child

    async def end(self) -> None:
        """End the child with all that it started."""
        child, self._child, self._rest, self.answered = self._child, None, b"", []
        if child is not None:
            kill_group(child.pid)
            await child.aclose()
