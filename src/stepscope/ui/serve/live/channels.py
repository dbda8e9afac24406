"""From one reader of a run folder to every browser that follows it.

A channel holds the latest update only. A browser that is slow gets the latest when it is ready for
one, and misses those in between: nothing queues up for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from stepscope.ui.serve.live.job_follower import JobFollower

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from stepscope.ui.serve.live.job_follower import RunLooks

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
        """The latest update whenever it is another one; None when nothing came for a while."""
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
        """The looks of a run that somebody follows."""
        followed = self._open.get(run_id)
        return followed[1].looks if followed is not None and not followed[0].is_over else None

    def why_not(self, run_id: str) -> str | None:
        """Why one more browser cannot follow this run."""
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
