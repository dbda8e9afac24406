"""Read one run folder while its job trains, for all browsers together, with a verdict on the
windows so far from a child process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import msgspec

from stepscope.errors import StepscopeError
from stepscope.explain.whole_run.live import MOST_ANEW, explain_live
from stepscope.records.run import LiveRun, VerdictNow
from stepscope.trace.files import is_trace_name
from stepscope.trace.run_folder.follow_run import FollowedRun, RunFollower
from stepscope.ui.jobs.environment import own_python
from stepscope.ui.jobs.process import end_group
from stepscope.ui.serve.live_view import LiveView, gone_view, last_asked_window, live_view
from stepscope.ui.serve.metrics import ExplainedJson, brief_verdict

# A look reads only what was added. Steps, rates and charts are new in every look; figures that take
# longer to compute are a second old at most. A look that takes long is followed by a longer rest,
# so that following takes a tenth of a core at most.

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
        """Return the view, or None without news. `now` is any clock that only goes forward."""
        try:
            followed = self._follower.read()
        except StepscopeError as error:
            return gone_view(self.folder, f"the run folder cannot be read any more: {error}")
        self._verdicts.look({rank.folder_name for rank in followed.ranks})
        window = last_asked_window(followed, unix)
        progress = [(rank.folder_name, rank.state, rank.steps.seen) for rank in followed.ranks]
        status = followed.run.status if followed.run else None
        verdict, busy = self._verdicts.verdict, self._verdicts.is_busy
        seen = (followed.state, status, progress, window, verdict, busy)
        if seen == self._seen and now - self._shown_at < _STILL_S:
            return None
        self._seen, self._shown_at = seen, now
        anew = MOST_ANEW if now - self._figures_at >= _FIGURES_S else 0
        self._figures_at = now if anew else self._figures_at
        self.run = explain_live(followed, unix, self.run, most_anew=anew)
        return live_view(
            self.run,
            followed,
            verdict,
            explaining=busy,
            reload=self.run.has_ended and self._is_concluded(followed, now),
            window=window,
        )

    @property
    def verdict(self) -> VerdictNow | None:
        return self._verdicts.verdict

    def _is_concluded(self, followed: FollowedRun, now: float) -> bool:
        """Return whether `stepscope run` has also written its report, or will not."""
        self._ended_at = now if self._ended_at is None else self._ended_at
        return followed.state != "running" or now - self._ended_at > _CONCLUDING_S

    def close(self) -> None:
        self._verdicts.close()


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


# What the windows recorded so far say: `stepscope explain --json` in a child process.
#
# A child, because a trace may take seconds and memory to read; at low priority, because the job may
# run on this machine. It starts when a new trace is there, one at a time.

LONGEST_S = 300.0
_AT_ONCE = threading.BoundedSemaphore(2)  # children of this process
_VERDICT_REST = 2.0  # times as long as the last one took, before the next
_MOST_LOOKED_AT = 16  # ranks


class VerdictChild:
    """Explains a run folder again and again. `look` never waits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._explained: object = None  # the traces of the last explanation
        self._child: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._began = self._rest_until = 0.0
        self.verdict: VerdictNow | None = None

    def look(self, ranks: Iterable[str]) -> None:
        """Take in the child's answer; start one if there are new traces in these rank folders."""
        now = time.monotonic()
        if self._child is not None:
            self._take_answer(now)
        if self._child is None and now >= self._rest_until:
            traces = _trace_stamps(self._folder, ranks)
            if traces and traces != self._explained and _AT_ONCE.acquire(blocking=False):
                self._explained = traces
                self._start(now)

    @property
    def is_busy(self) -> bool:
        return self._child is not None

    def close(self) -> None:
        """End the child, if it runs."""
        if self._child is not None:
            end_group(self._child)
            self._forget_child()

    def _start(self, now: float) -> None:
        command = own_python("stepscope", "explain", str(self._folder), "--json", "--workers", "1")
        self._began = now
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - until the child has ended
        try:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self.verdict = VerdictNow(verdict=f"explaining failed: {error}", failed=True)
            self._forget_child()
            return
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._child.pid, _NICER)

    def _take_answer(self, now: float) -> None:
        assert self._child is not None
        assert self._output is not None
        code = self._child.poll()
        if code is None and now - self._began < LONGEST_S:
            return
        if code is None:
            end_group(self._child)
            why = f"explaining took more than {LONGEST_S:g} s and was stopped"
            self.verdict = VerdictNow(verdict=why, failed=True)
        else:
            self._output.seek(0)
            self.verdict = _read_answer(self._output.read(), code) or self.verdict
        self._rest_until = now + _VERDICT_REST * (now - self._began)
        self._forget_child()

    def _forget_child(self) -> None:
        if self._output is not None:
            self._output.close()
            _AT_ONCE.release()
        self._child = self._output = None


def _read_answer(text: bytes, code: int) -> VerdictNow | None:
    """Return None where nothing can be said yet, such as a trace that went away while it was
    read.
    """
    if code:
        return None
    try:
        return brief_verdict(msgspec.json.decode(text, type=ExplainedJson))
    except msgspec.DecodeError:
        return VerdictNow(verdict="explaining gave no answer that can be read", failed=True)


def _trace_stamps(folder: Path, ranks: Iterable[str]) -> list[tuple[str, str, int]]:
    """Return the traces of the first ranks; none until each of them has one."""
    stamps: list[tuple[str, str, int]] = []
    for name in sorted(ranks)[:_MOST_LOOKED_AT]:
        before = len(stamps)
        with contextlib.suppress(OSError), os.scandir(folder / name) as entries:
            stamps += sorted(
                (name, entry.name, entry.stat().st_mtime_ns)
                for entry in entries
                if is_trace_name(entry.name) and entry.name.startswith("trace")
            )
        if len(stamps) == before:
            return []
    return stamps
