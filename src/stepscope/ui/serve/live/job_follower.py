"""Reads one run folder while its job trains, in a thread of its own, for all browsers together.

A look reads only what was added. Steps, rates and charts are new in every look; figures that take
longer to compute are a second old at most. A look that takes long is followed by a longer rest, so
that following takes a tenth of a core at most.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import StepscopeError
from stepscope.explain.whole_run.live import MOST_ANEW, explain_live
from stepscope.trace.follow_run import RunFollower
from stepscope.ui.serve.live.live_view import LiveView, gone_view, live_view
from stepscope.ui.serve.live.verdict_now import VerdictChild
from stepscope.ui.window_now import last_asked_window

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stepscope.records.live_run import LiveRun, VerdictNow
    from stepscope.trace.follow_run import FollowedRun

SHORTEST_REST_S = 0.1  # ten updates a second are as many as an eye can follow
_REST, _LONGEST_REST_S = 9, 60.0  # times as long as a look took
_STILL_S = 1.0  # without news, the time that passes is shown
_FIGURES_S = 1.0
_CONCLUDING_S = 120.0  # `stepscope run` explains the run after its end
_NICER = 10


class RunLooks:
    """Looks at one folder, one after another; no thread, no clock of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._follower = RunFollower(folder)
        self._verdicts = VerdictChild(folder)
        self.run: LiveRun | None = None  # as it was at the last look
        self._seen: object = None
        self._shown_at = self._figures_at = float("-inf")
        self._ended_at: float | None = None

    def look(self, now: float, unix: float) -> LiveView | None:
        """None without news. `now` is any clock that only goes forward."""
        try:
            followed = self._follower.read()
        except StepscopeError as error:
            return gone_view(self.folder, f"the run folder cannot be read any more: {error}")
        self._verdicts.look({rank.folder_name for rank in followed.ranks})
        window = last_asked_window(followed, unix)
        seen = (*_progress(followed), window, self._verdicts.verdict, self._verdicts.is_busy)
        if seen == self._seen and now - self._shown_at < _STILL_S:
            return None
        self._seen, self._shown_at = seen, now
        anew = MOST_ANEW if now - self._figures_at >= _FIGURES_S else 0
        self._figures_at = now if anew else self._figures_at
        self.run = explain_live(followed, unix, self.run, most_anew=anew)
        return live_view(
            self.run,
            followed,
            self._verdicts.verdict,
            explaining=self._verdicts.is_busy,
            reload=self.run.has_ended and self._is_concluded(followed, now),
            window=window,
        )

    @property
    def verdict(self) -> VerdictNow | None:
        return self._verdicts.verdict

    def _is_concluded(self, followed: FollowedRun, now: float) -> bool:
        """Whether `stepscope run` has also written its report, or will not."""
        self._ended_at = now if self._ended_at is None else self._ended_at
        return followed.state != "running" or now - self._ended_at > _CONCLUDING_S

    def close(self) -> None:
        self._verdicts.close()


def _progress(followed: FollowedRun) -> tuple[object, ...]:
    return (
        followed.state,
        followed.run.status if followed.run else None,
        *((rank.folder_name, rank.state, rank.steps.seen) for rank in followed.ranks),
    )


class JobFollower:
    """Publishes updates until the run ends or `stop` is called."""

    def __init__(self, folder: Path, publish: Callable[[bytes, bool], object]) -> None:
        self.looks = RunLooks(folder)
        self._publish = publish
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stepscope-live", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, wait_s: float = 0.0) -> None:
        """The thread ends after its look; wait for that no longer than this."""
        self._stop.set()
        if wait_s:
            self._thread.join(wait_s)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # of this thread, on Linux: the job comes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICER)
        try:
            self._follow()
        except Exception as error:  # a thread that ends silently would leave browsers waiting
            why = f"a defect in stepscope: {type(error).__name__}: {error}"
            self._publish(encode(gone_view(self.looks.folder, why)), True)
        finally:
            self.looks.close()

    def _follow(self) -> None:
        rest_s = 0.0
        while not self._stop.wait(rest_s):
            began = time.monotonic()
            view = self.looks.look(began, time.time())
            if view is not None:
                is_last = view.has_ended and (view.reload or view.status == "gone")
                self._publish(encode(view), is_last)
                if is_last:
                    return
            took = time.monotonic() - began
            rest_s = max(SHORTEST_REST_S, min(_REST * took, _LONGEST_REST_S))


def encode(view: LiveView) -> bytes:
    return msgspec.json.encode(view)
