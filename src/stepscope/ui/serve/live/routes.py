"""What serve answers about running jobs: their updates, a window now, and metrics."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from stepscope.errors import StepscopeError, UsageError
from stepscope.trace.follow_run import RunFollower
from stepscope.ui.serve.answers import shown_status
from stepscope.ui.serve.live.channels import LiveChannels
from stepscope.ui.serve.live.job_follower import encode
from stepscope.ui.serve.live.live_view import gone_view
from stepscope.ui.serve.live.running_metrics import RunningMetrics
from stepscope.ui.window_now import ask_for_window

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from starlette.requests import Request
    from starlette.responses import Response

    from stepscope.ui.serve.live.channels import LiveChannel
    from stepscope.ui.serve.live.running_metrics import ListedRun

RETRY_MS = 1000  # after which a browser connects again
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GONE = "this run is not there, or not any more"


class Runs(Protocol):
    """The folders that serve shows."""

    def folder_of(self, run_id: str) -> Path | None: ...
    def scan(self) -> Iterable[ListedRun]: ...


def live_routes(runs: Runs) -> list[Route]:
    """For an application that never ends; otherwise close `LiveAnswers`."""
    return LiveAnswers(runs).routes()


class LiveAnswers:
    """The answers to three kinds of request, behind the checks for the token and the origin."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._channels = LiveChannels()
        self._metrics = RunningMetrics(runs.scan, self._channels.looks_of)

    def routes(self) -> list[Route]:
        return [
            Route("/runs/{run_id}/events", self.events, methods=["GET"]),
            Route("/runs/{run_id}/capture", self.capture, methods=["POST"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]

    def close(self) -> None:
        """Let go of every run folder, and end the processes that explain windows."""
        self._channels.close()
        self._metrics.close()

    async def events(self, request: Request) -> Response:
        run_id = request.path_params["run_id"]
        folder = self._runs.folder_of(run_id)
        if folder is None:
            return _stream(_only(encode(gone_view(Path("unknown run"), _GONE))))
        if why := self._channels.why_not(run_id):
            return PlainTextResponse(f"{why}\n", status_code=503)

        async def stream() -> AsyncIterator[bytes]:
            async with self._channels.follow(run_id, folder) as channel:
                async for message in _messages(channel):
                    yield message

        return _stream(stream())

    async def capture(self, request: Request) -> Response:
        folder = self._runs.folder_of(request.path_params["run_id"])
        if folder is None:
            return _refused(request, _GONE, 404)
        try:
            asked = await run_in_threadpool(_ask, folder)
        except StepscopeError as error:
            return _refused(request, str(error), 409 if isinstance(error, UsageError) else 404)
        return JSONResponse({"id": asked}, status_code=202)

    async def metrics(self, request: Request) -> Response:
        del request
        try:
            text = await run_in_threadpool(self._metrics.text)
        except StepscopeError as error:
            return PlainTextResponse(f"{error}\n", status_code=503)
        return PlainTextResponse(text, media_type=_METRICS_TYPE)


def _refused(request: Request, why: str, status: int) -> JSONResponse:
    return JSONResponse({"error": why}, status_code=shown_status(request, status))


def _stream(messages: AsyncIterator[bytes]) -> StreamingResponse:
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(messages, media_type="text/event-stream", headers=headers)


async def _only(update: bytes) -> AsyncIterator[bytes]:
    """A page cannot see why a stream was refused; it can show an update."""
    yield _message(update)


def _ask(folder: Path) -> str:
    return ask_for_window(RunFollower(folder).read(), time.time())


async def _messages(channel: LiveChannel) -> AsyncIterator[bytes]:
    """As the browser's EventSource reads them."""
    yield b"retry: %d\n\n" % RETRY_MS
    async for update in channel.updates():
        yield _message(update) if update is not None else b": still there\n\n"


def _message(update: bytes) -> bytes:
    return b"data: %s\n\n" % update
