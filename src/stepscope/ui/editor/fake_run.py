"""Run a script's steps with fake tensors within a time limit, in a fork of a process that
has imported torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.errors import NotCapturedError, UnreadableInputError
from stepscope.measure import __file__ as _measure
from stepscope.measure.fake_step import ENDED
from stepscope.text.figures import long_duration
from stepscope.trace.files import read_whole
from stepscope.ui.jobs.process import kill_group

_MOST_ANSWER = 64 << 20
_LATER_S = 10.0  # the script ends by itself if we cannot end it


class LineCall(msgspec.Struct, frozen=True):
    """Calls of an operator, with the line that they belong to."""

    file: str
    line: int
    function: str
    phase: str
    name: str
    shapes: list[list[int]]
    dtypes: list[str]
    count: int


class FakeAnswer(msgspec.Struct, frozen=True):
    """What the child found, or why it found nothing."""

    failed: str | None = None
    calls: list[LineCall] = []
    kept: list[tuple[str, int, int]] = []  # file, line, bytes
    parameter_bytes: int = 0


class FakeScript(NamedTuple):
    """A script as the editor has it; `texts` are its own and those of files that it imports."""

    script: Path
    texts: tuple[tuple[str, str], ...]  # by resolved path
    arguments: tuple[str, ...]
    python: str
    cwd: Path


def run_with_fakes(
    script: FakeScript, limit_s: float, stop: threading.Event | None = None
) -> FakeAnswer:
    """Raises NotCapturedError if it cannot be run so, and says why; `stop` ends it early."""
    name = script.script.name
    with tempfile.TemporaryDirectory(prefix="stepscope-") as place:
        request, answer, errors = (Path(place) / part for part in ("request", "answer", "errors"))
        content = {
            "script": str(script.script),
            "texts": dict(script.texts),
            "arguments": script.arguments,
            "cwd": str(script.cwd),
            "limit_s": limit_s + _LATER_S,
            "answer": str(answer),
            "errors": str(errors),
        }
        request.write_bytes(msgspec.json.encode(content))
        warm_python(script.python).run(request, name, limit_s, stop)
        return _read(answer, errors, name)


def _read(path: Path, errors: Path, name: str) -> FakeAnswer:
    try:
        answer = msgspec.json.decode(read_whole(path, _MOST_ANSWER), type=FakeAnswer)
    except (UnreadableInputError, msgspec.MsgspecError):
        lines: list[str] = []
        with contextlib.suppress(UnreadableInputError):
            lines = read_whole(errors, _MOST_ANSWER).decode(errors="replace").splitlines()[-3:]
        why = "; ".join(lines) or "it ended without an answer"
        raise NotCapturedError(f"{name} cannot be estimated: {why}") from None
    if answer.failed:
        raise NotCapturedError(f"{name} cannot be estimated with fake tensors: {answer.failed}")
    return answer


# A Python process that has imported torch, and forks for each script that is run with fakes.
#
# Importing torch takes seconds, and somebody is typing: so the process stays while ours lives.

# The user's interpreter may be older than -P; `sys` itself is never a file of the folder.
_PROGRAM = (
    "import sys; sys.path[:] = [*filter(None, sys.path), {root!r}]; "
    "from stepscope.measure.fake_step import main; main()"
)
_ROOT = Path(_measure).parents[2]
_LOOK_S = 0.1
_LAST_BYTES = 500

_warm: dict[str, WarmPython] = {}
_choosing = threading.Lock()


def warm_python(python: str) -> WarmPython:
    """Return the process of this interpreter; a new one if it has ended."""
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
        self._unread = b""
        self._child: int | None = None  # the script that runs
        self._abandoned = 0  # requests that nobody waits for any more
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
        kill_group(self._process.pid)
        self._process.communicate()  # closes its pipes
        self._errors.close()

    def run(
        self, request: Path, name: str, limit_s: float, stop: threading.Event | None = None
    ) -> None:
        """Run until the script has ended. NotCapturedError if it is stopped or out of time."""
        wait = _Wait(name, limit_s, stop)
        while not self._turn.acquire(timeout=_LOOK_S):
            wait.check()
        try:
            self._run(request, wait)
        finally:
            self._turn.release()

    def _run(self, request: Path, wait: _Wait) -> None:
        assert self._process.stdin is not None
        for _ in range(self._abandoned):
            self._until_ended(wait)
            self._abandoned -= 1
        with contextlib.suppress(BrokenPipeError):  # it has ended: its output says so
            os.write(self._process.stdin.fileno(), f"{request}\n".encode())
        self._child = None
        try:
            self._until_ended(wait)
        except _OverError:
            self._end_script()
            raise
        finally:
            if self._child is not None:  # what the script started and left
                kill_group(self._child)

    def _until_ended(self, wait: _Wait) -> None:
        while (line := self._next_line()) != ENDED:
            if line is None:
                raise NotCapturedError(f"{wait.name} cannot be estimated: {self._why()}")
            if line:
                self._child = int(line)
            wait.check()

    def _next_line(self) -> str | None:
        """Read a line: empty if it says nothing for a while, None once it has ended."""
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        if b"\n" not in self._unread:
            if not select.select([output], [], [], _LOOK_S)[0]:
                return ""
            said = os.read(output, 4096)
            if not said:
                return None
            self._unread += said
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def _end_script(self) -> None:
        """While torch is still imported there is none: its request is gone when it comes to it."""
        if self._child is None:
            self._abandoned += 1
            return
        kill_group(self._child)
        while self._next_line() not in (ENDED, None):
            pass

    def _why(self) -> str:
        self._process.wait()
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _LAST_BYTES))
        lines = self._errors.read().decode(errors="replace").splitlines()
        return lines[-1] if lines else f"Python ended with code {self._process.returncode}"


class _OverError(NotCapturedError):
    """Nobody waits for the script any more."""


class _Wait:
    """How long somebody waits for one script."""

    def __init__(self, name: str, limit_s: float, stop: threading.Event | None) -> None:
        self.name, self._limit_s, self._stop = name, limit_s, stop
        self._until = time.monotonic() + limit_s

    def check(self) -> None:
        """Raises _OverError once it is stopped or out of time."""
        if self._stop is not None and self._stop.is_set():
            raise _OverError(f"the estimate of {self.name} was stopped")
        if time.monotonic() > self._until:
            raise _OverError(
                f"{self.name} did not come to its second step within "
                f"{long_duration(self._limit_s * 1e9)} with fake tensors: profile it instead"
            )
