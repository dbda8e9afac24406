"""A Python process that has imported torch, and forks for each script that is run with fakes.

Importing torch takes seconds, and somebody is typing: so the process stays while ours lives.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import NotCapturedError
from stepscope.measure import __file__ as _measure
from stepscope.measure.fake_server import ENDED
from stepscope.records.figures import long_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROGRAM = (
    "import sys; sys.path.append({root!r}); from stepscope.measure.fake_server import main; main()"
)
_ROOT = Path(_measure).parents[2]
_LOOK_S = 0.1
_LAST_BYTES = 500

_warm: dict[str, WarmPython] = {}
_choosing = threading.Lock()


def warm_python(python: str) -> WarmPython:
    """The one of this interpreter; a new one if it has ended."""
    with _choosing:
        known = _warm.get(python)
        if known is not None and known.has_ended:
            known.close()
            known = None
        if known is None:
            known = _warm[python] = WarmPython(python)
        return known


def end_warm_pythons() -> None:
    """They also end by themselves when this process does."""
    with _choosing:
        while _warm:
            _warm.popitem()[1].close()


class WarmPython:
    """One script at a time; whoever comes meanwhile waits."""

    def __init__(self, python: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process lives)
        self._turn = threading.Lock()
        try:
            self._process = subprocess.Popen(
                [python, "-c", _PROGRAM.format(root=str(_ROOT))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise NotCapturedError(f"{python} cannot be started: {error.strerror}") from None

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        _kill_group(self._process.pid)
        self._process.communicate()  # closes its pipes
        self._errors.close()

    def run(
        self, request: Path, name: str, limit_s: float, stop: threading.Event | None = None
    ) -> None:
        """Until the script has ended. Raises NotCapturedError if it is stopped or out of time."""
        wait = _Wait(name, limit_s, stop)
        while not self._turn.acquire(timeout=_LOOK_S):
            wait.check()
        try:
            self._run(request, wait)
        finally:
            self._turn.release()

    def _run(self, request: Path, wait: _Wait) -> None:
        assert self._process.stdin is not None
        child: int | None = None
        lines = self._lines()
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended: its output says so
                os.write(self._process.stdin.fileno(), f"{request}\n".encode())
            for line in lines:
                if line == ENDED:
                    return
                if line:
                    child = int(line)
                wait.check()
        except NotCapturedError:
            self._end(child, lines)
            raise
        finally:
            if child is not None:  # what the script started and left
                _kill_group(child)
        raise NotCapturedError(f"{wait.name} cannot be estimated: {self._why()}")

    def _lines(self) -> Iterator[str]:
        """What it says, and an empty line whenever it says nothing for a while."""
        assert self._process.stdout is not None
        output, rest = self._process.stdout.fileno(), b""
        while True:
            ready, _, _ = select.select([output], [], [], _LOOK_S)
            if not ready:
                yield ""
                continue
            said = os.read(output, 4096)
            if not said:
                return
            *whole, rest = (rest + said).split(b"\n")
            yield from (line.decode() for line in whole)

    def _end(self, child: int | None, lines: Iterator[str]) -> None:
        """The script and whatever it started; the process itself if it does not answer yet."""
        if child is None:
            _kill_group(self._process.pid)
            self._process.wait()
            return
        _kill_group(child)
        next((line for line in lines if line == ENDED), None)

    def _why(self) -> str:
        self._process.wait()
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _LAST_BYTES))
        lines = self._errors.read().decode(errors="replace").splitlines()
        return lines[-1] if lines else f"Python ended with code {self._process.returncode}"


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


class _Wait:
    """How long somebody waits for one script."""

    def __init__(self, name: str, limit_s: float, stop: threading.Event | None) -> None:
        self.name, self._limit_s, self._stop = name, limit_s, stop
        self._until = time.monotonic() + limit_s

    def check(self) -> None:
        """Raises NotCapturedError once it is over."""
        if self._stop is not None and self._stop.is_set():
            raise NotCapturedError(f"the estimate of {self.name} was stopped")
        if time.monotonic() > self._until:
            raise NotCapturedError(
                f"{self.name} did not come to its second step within "
                f"{long_duration(self._limit_s * 1e9)} with fake tensors: profile it instead"
            )
