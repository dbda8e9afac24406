"""Profiles a script from any thread of an editor's server, within a time limit."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.records.words import counted
from stepscope.trace.regular_files import read_tail
from stepscope.ui.editor.profile_child import ProfiledScript, ProfileRequest
from stepscope.ui.own_python import own_python

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_LOOK_S = 0.2
_AFTER_LIMIT_S = 30.0  # for the child to end the script's processes by itself
_LAST_BYTES = 4 << 10


def profile_script(
    script: Path,
    arguments: Sequence[str],
    *,
    limit_s: float,
    folder: Path,
    on_progress: Callable[[str], None] = lambda _: None,
    python: str | None = None,
    cwd: Path | None = None,
    stop: threading.Event | None = None,
) -> ProfiledScript:
    """Run the script for some 20 steps, into the new run folder `folder`.

    `on_progress` gets a sentence now and then. `stop` ends it early. A failure is an answer: it
    says why. The script's processes are gone when this returns.
    """
    script = script.absolute()
    if not script.is_file():
        return ProfiledScript(failed=f"{script} does not exist: save it first")
    request = ProfileRequest(
        command=(python or sys.executable, str(script), *arguments),
        folder=str(folder.absolute()),
        cwd=str((cwd or script.parent).absolute()),
        limit_s=limit_s,
    )
    began = time.monotonic()
    child = subprocess.Popen(
        own_python("stepscope.ui.editor.profile_child"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        answers = _Answers(child, msgspec.json.encode(request))
        ended = _wait(child, began + limit_s + _AFTER_LIMIT_S, folder, on_progress, stop)
    finally:
        _end(child)
    answer = answers.read()
    if ended is not None:
        return ProfiledScript(failed=ended, took_s=time.monotonic() - began)
    return answer


class _Answers:
    """Feeds the child and reads what it says, so that no pipe fills up."""

    def __init__(self, child: subprocess.Popen[bytes], request: bytes) -> None:
        self._child, self._request = child, request
        self._said: tuple[bytes, bytes] = (b"", b"")
        self._thread = threading.Thread(target=self._talk, name="stepscope-profile", daemon=True)
        self._thread.start()

    def _talk(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._said = self._child.communicate(self._request)

    def read(self) -> ProfiledScript:
        self._thread.join(_AFTER_LIMIT_S)
        out, errors = self._said
        try:
            return msgspec.json.decode(out, type=ProfiledScript)
        except msgspec.MsgspecError:
            lines = tuple(errors.decode(errors="replace").splitlines()[-8:])
            return ProfiledScript(failed="profiling broke off without an answer", output=lines)


def _wait(
    child: subprocess.Popen[bytes],
    until: float,
    folder: Path,
    on_progress: Callable[[str], None],
    stop: threading.Event | None,
) -> str | None:
    """Until the child ends; why it has to be ended, if it does not."""
    said = ""
    while child.poll() is None:
        if stop is not None and stop.is_set():
            return "profiling was stopped"
        if time.monotonic() > until:
            return "profiling did not end by itself after its time was up, and was killed"
        if (words := _progress(folder)) != said:
            said = words
            on_progress(words)
        time.sleep(_LOOK_S)
    return None


def _progress(folder: Path) -> str:
    """How far it is, by the files of the run."""
    if any(folder.glob("rank-*/lines.json")):
        return "lines recorded; timing steps without the profiler"
    steps = max((_last_step(file) for file in folder.glob("rank-*/steps.jsonl")), default=None)
    return "starting the script" if steps is None else f"training: {counted(steps, 'step')}"


def _last_step(file: Path) -> int:
    with contextlib.suppress(UnreadableInputError, ValueError, KeyError, IndexError):
        lines = read_tail(file, _LAST_BYTES).splitlines()
        return 1 + int(msgspec.json.decode(lines[-1])["step"])
    return 0


def _end(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM lets it end the script's processes; if it is killed, its warden does that."""
    if child.poll() is not None:
        return
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_AFTER_LIMIT_S)
        return
    child.kill()
    child.wait()
