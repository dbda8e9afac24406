"""Runs a script's steps with fake tensors in a child process, within a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stepscope.errors import NotCapturedError, UnreadableInputError
from stepscope.measure import __file__ as _measure
from stepscope.records.figures import long_duration
from stepscope.trace.regular_files import read_whole

if TYPE_CHECKING:
    import threading

_ROOT = Path(_measure).parents[2]
_PROGRAM = (
    "import sys; sys.path.append({root!r}); from stepscope.measure.fake_step import main; main()"
)
_LOOK_S = 0.1
_MOST_ANSWER = 64 << 20


class FakeCall(msgspec.Struct, frozen=True):
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
    calls: list[FakeCall] = []
    kept: list[tuple[str, int, int]] = []  # file, line, bytes
    parameter_bytes: int = 0


class FakeScript(NamedTuple):
    """A script as the editor has it."""

    script: Path
    text: str
    arguments: tuple[str, ...]
    python: str
    cwd: Path


def run_with_fakes(
    script: FakeScript, limit_s: float, stop: threading.Event | None = None
) -> FakeAnswer:
    """Raises NotCapturedError if it cannot be run so, and says why; `stop` ends it early."""
    with tempfile.TemporaryDirectory(prefix="stepscope-") as place:
        answer = Path(place) / "answer.json"
        request = {
            "script": str(script.script),
            "text": script.text,
            "arguments": list(script.arguments),
            "answer": str(answer),
        }
        child = subprocess.Popen(
            [script.python, "-c", _PROGRAM.format(root=str(_ROOT))],
            cwd=script.cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        content = msgspec.json.encode(request)
        errors = _communicate(child, content, limit_s, script.script.name, stop)
        return _read(answer, errors, script.script.name)


def _communicate(
    child: subprocess.Popen[bytes],
    request: bytes,
    limit_s: float,
    name: str,
    stop: threading.Event | None,
) -> list[str]:
    """The last lines that it wrote to stderr. Its whole group is ended when its time is up."""
    until = time.monotonic() + limit_s
    unsent: bytes | None = request
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, errors = child.communicate(unsent, timeout=_LOOK_S)
                break
            unsent = None  # it may be given only once
            if stop is not None and stop.is_set():
                raise NotCapturedError(f"the estimate of {name} was stopped")
            if time.monotonic() > until:
                raise NotCapturedError(
                    f"{name} did not come to its second step within {long_duration(limit_s * 1e9)} "
                    "with fake tensors: profile it instead"
                )
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return errors.decode(errors="replace").splitlines()[-3:]


def _read(path: Path, errors: list[str], name: str) -> FakeAnswer:
    try:
        answer = msgspec.json.decode(read_whole(path, _MOST_ANSWER), type=FakeAnswer)
    except (UnreadableInputError, msgspec.MsgspecError):
        why = "; ".join(errors) or "it ended without an answer"
        raise NotCapturedError(f"{name} cannot be estimated: {why}") from None
    if answer.failed:
        raise NotCapturedError(f"{name} cannot be estimated with fake tensors: {answer.failed}")
    return answer
