"""What the windows recorded so far say: `stepscope explain --json` in a child process.

A child, because a trace may take seconds and memory to read; at low priority, because the job may
run on this machine. It starts when a new trace is there, one at a time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from typing import IO, TYPE_CHECKING

import msgspec

from stepscope.records.live_run import VerdictNow
from stepscope.trace.layout import is_trace_name
from stepscope.ui.brief_verdict import ExplainedJson, brief_verdict
from stepscope.ui.own_python import own_python

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

LONGEST_S = 300.0
_AT_ONCE = threading.BoundedSemaphore(2)  # children of this process
_NICER = 10
_REST = 2.0  # times as long as the last one took, before the next
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
            _kill(self._child)
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
            _kill(self._child)
            why = f"explaining took more than {LONGEST_S:g} s and was stopped"
            self.verdict = VerdictNow(verdict=why, failed=True)
        else:
            self._output.seek(0)
            self.verdict = _read_answer(self._output.read(), code) or self.verdict
        self._rest_until = now + _REST * (now - self._began)
        self._forget_child()

    def _forget_child(self) -> None:
        if self._output is not None:
            self._output.close()
            _AT_ONCE.release()
        self._child = self._output = None


def _read_answer(text: bytes, code: int) -> VerdictNow | None:
    """None where nothing can be said yet, such as a trace that went away while it was read."""
    if code:
        return None
    try:
        return brief_verdict(msgspec.json.decode(text, type=ExplainedJson))
    except msgspec.DecodeError:
        return VerdictNow(verdict="explaining gave no answer that can be read", failed=True)


def _trace_stamps(folder: Path, ranks: Iterable[str]) -> tuple[tuple[str, str, int], ...]:
    """The traces of the first ranks; empty until each of them has one."""
    stamps: list[tuple[str, str, int]] = []
    for name in sorted(ranks)[:_MOST_LOOKED_AT]:
        own = [(name, *stamp) for stamp in _own_traces(folder / name)]
        if not own:
            return ()
        stamps += own
    return tuple(stamps)


def _own_traces(rank: Path) -> list[tuple[str, int]]:
    try:
        with os.scandir(rank) as entries:
            return sorted(
                (entry.name, entry.stat().st_mtime_ns)
                for entry in entries
                if is_trace_name(entry.name) and entry.name.startswith("trace")
            )
    except OSError:
        return []


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(5)
