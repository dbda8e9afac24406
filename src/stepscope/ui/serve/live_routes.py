"""Answer about running jobs: their updates, from one reader of a run folder to every browser
that follows it, a window now, and metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from stepscope.errors import StepscopeError, UsageError
from stepscope.records.folders import process_state
from stepscope.trace.decode import Oddities, read_record
from stepscope.trace.run_folder.follow_run import RunFollower, RunSoFar
from stepscope.trace.run_folder.run_state import RUN
from stepscope.ui.serve.job_follower import JobFollower, RunLooks, encode
from stepscope.ui.serve.listed_runs import RunsDirectory, ServedFolder
from stepscope.ui.serve.live_view import ask_for_window, gone_view
from stepscope.ui.serve.metrics import RunMetrics, metrics_text
from stepscope.ui.serve.routes import shown_status

if TYPE_CHECKING:
    from starlette.requests import Request

RETRY_MS = 1000  # after which a browser connects again
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GONE = "this run is not there, or not any more"


class LiveAnswers:
    """The answers to three kinds of request, behind the checks for the token and the origin."""

    def __init__(self, runs: RunsDirectory) -> None:
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
        if folder is not None and (why := self._channels.why_not(run_id)):
            return PlainTextResponse(f"{why}\n", status_code=503)

        async def stream() -> AsyncIterator[bytes]:
            """Write what the browser's EventSource reads."""
            if folder is None:  # a page cannot see why a stream was refused; it can show an update
                yield _message(encode(gone_view(Path("unknown run"), _GONE)))
                return
            async with self._channels.follow(run_id, folder) as channel:
                yield b"retry: %d\n\n" % RETRY_MS
                async for update in channel.updates():
                    yield _message(update) if update is not None else b": still there\n\n"

        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)

    async def capture(self, request: Request) -> Response:
        folder = self._runs.folder_of(request.path_params["run_id"])
        if folder is None:
            return _refused(request, _GONE, 404)

        def ask() -> str:
            return ask_for_window(RunFollower(folder).read(), time.time())

        try:
            asked = await run_in_threadpool(ask)
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


def _message(update: bytes) -> bytes:
    return b"data: %s\n\n" % update


# A channel holds the latest update only. A browser that is slow gets the latest when it is ready
# for one, and misses those in between: nothing queues up for it.

MOST_CHANNELS = 32
MOST_BROWSERS = 128
LINGER_S = 5.0  # after its last browser: a page that is loaded again finds its reader
STILL_THERE_S = 15.0  # between two signs of life


class LiveChannel:
    """The latest update of one run. Used in the event loop's thread."""

    def __init__(self) -> None:
        self.update = b""
        self.version = 0
        self.is_over = False
        self.browsers = 0
        self._news = asyncio.Event()

    def publish(self, update: bytes, is_last: bool) -> None:
        self.update, self.is_over = update, is_last
        self.version += 1
        self._news.set()
        self._news = asyncio.Event()

    async def updates(self, still_there_s: float = STILL_THERE_S) -> AsyncIterator[bytes | None]:
        """Yield the latest update whenever it is another one; None when nothing came for a
        while.
        """
        seen = 0
        while True:
            if self.version == seen:
                try:
                    await asyncio.wait_for(self._news.wait(), still_there_s)
                except TimeoutError:
                    yield None
                continue
            seen = self.version
            yield self.update
            if self.is_over and self.version == seen:
                return


class LiveChannels:
    """One channel and one reader for each run that somebody follows."""

    def __init__(self, linger_s: float = LINGER_S) -> None:
        self._linger_s = linger_s
        self._open: dict[str, tuple[LiveChannel, JobFollower]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def looks_of(self, run_id: str) -> RunLooks | None:
        """Return the looks of a run that somebody follows."""
        followed = self._open.get(run_id)
        return followed[1].looks if followed is not None and not followed[0].is_over else None

    def why_not(self, run_id: str) -> str | None:
        """Return why one more browser cannot follow this run."""
        if sum(channel.browsers for channel, _ in self._open.values()) >= MOST_BROWSERS:
            return f"{MOST_BROWSERS} browsers follow runs already"
        if run_id not in self._open and len(self._open) >= MOST_CHANNELS:
            return f"{MOST_CHANNELS} runs are followed already"
        return None

    @contextlib.asynccontextmanager
    async def follow(self, run_id: str, folder: Path) -> AsyncIterator[LiveChannel]:
        """Ask `why_not` before: an open port must be no way to use up the machine."""
        channel = self._channel(run_id, folder)
        channel.browsers += 1
        try:
            yield channel
        finally:
            channel.browsers -= 1
            loop = asyncio.get_running_loop()
            loop.call_later(self._linger_s, self._close_unused, run_id, channel)

    def _channel(self, run_id: str, folder: Path) -> LiveChannel:
        if run_id in self._open and not self._open[run_id][0].is_over:
            return self._open[run_id][0]
        channel, loop = LiveChannel(), asyncio.get_running_loop()

        def publish(update: bytes, is_last: bool) -> None:
            with contextlib.suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(channel.publish, update, is_last)

        follower = JobFollower(folder, publish)
        self._open[run_id] = channel, follower
        follower.start()
        return channel

    def _close_unused(self, run_id: str, channel: LiveChannel) -> None:
        current = self._open.get(run_id)
        if current is not None and current[0] is channel and not channel.browsers:
            current[1].stop()
            del self._open[run_id]

    def close(self) -> None:
        """The server stops."""
        for channel, follower in self._open.values():
            follower.stop(wait_s=1.0)
            channel.publish(channel.update, True)
        self._open.clear()


# /metrics: the runs that go on below the served folder.

MOST_RUNS = 32
_SCAN_S = 5.0  # a scan of thousands of folders takes a while
_SILENT_S = 600.0  # without run.json, steps that are older say that nothing runs


class RunningMetrics:
    """Reads each running folder on, from scrape to scrape. Safe to use from several threads."""

    def __init__(
        self,
        scan: Callable[[], Iterable[ServedFolder]],
        looks_of: Callable[[str], RunLooks | None],
    ) -> None:
        self._scan, self._looks_of = scan, looks_of
        self._lock = threading.Lock()
        self._scanned_at = float("-inf")
        self._listed: list[ServedFolder] = []
        self._ended: dict[str, str] = {}  # stamps of runs that had ended
        self._own: dict[str, RunLooks] = {}  # of runs that no browser follows

    def text(self) -> str:
        with self._lock:
            if time.monotonic() - self._scanned_at >= _SCAN_S:
                self._listed = [one for one in self._scan() if one.kind == "run"]
                self._scanned_at = time.monotonic()
            running = [one for one in self._listed if not self._has_ended(one)]
            runs = [run for one in running[:MOST_RUNS] if (run := self._measure(one)) is not None]
            self._forget({one.id for one in running[:MOST_RUNS]})
        return metrics_text(runs, left_out=max(0, len(running) - MOST_RUNS))

    def close(self) -> None:
        with self._lock:
            self._forget(set())

    def _has_ended(self, listed: ServedFolder) -> bool:
        if self._ended.get(listed.id) == listed.stamp:
            return True
        if _is_running(listed.path):
            return False
        self._ended[listed.id] = listed.stamp
        return True

    def _measure(self, listed: ServedFolder) -> RunMetrics | None:
        looks = self._looks_of(listed.id)
        if looks is None:
            looks = self._own.get(listed.id) or self._own.setdefault(
                listed.id, RunLooks(listed.path)
            )
            looks.look(time.monotonic(), time.time())
        if looks.run is None:
            return None
        labels = {"run": listed.id, "name": listed.path.name}
        return RunMetrics(labels=labels, run=looks.run, verdict=looks.verdict)

    def _forget(self, running: set[str]) -> None:
        for run_id in self._own.keys() - running:
            self._own.pop(run_id).close()


def _is_running(folder: Path) -> bool:
    run = read_record(folder / RUN, RunSoFar, Oddities(RUN))
    if run is None:
        try:
            changed = (folder / "rank-00000" / "steps.jsonl").stat().st_mtime
        except OSError:
            return False
        return time.time() - changed < _SILENT_S
    if run.status != "running":
        return False
    return run.process is None or process_state(run.process) in ("running", "unknown")
