"""Profile one script in a process of its own, which can be ended at any time; start it from
any thread of an editor's server.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError, UnreadableInputError
from stepscope.measure.session.trial import ENOUGH
from stepscope.measure.settings import Settings
from stepscope.text.figures import long_duration
from stepscope.text.words import counted
from stepscope.trace.files import read_tail
from stepscope.ui.jobs.capture import capture_to_end
from stepscope.ui.jobs.environment import own_python
from stepscope.ui.jobs.process import last_lines

# python -m stepscope.ui.editor.profile_child < request (JSON: ProfileRequest)
#
# The script's processes end with this one, whatever ends it.

# Step 0 sets things up, 1 warms the profiler up, 2 and 3 are recorded, memory is measured in 5 and
# lines in 8 and 9; the rest is measured without any of it.
WAIT, WARMUP, ACTIVE, STEPS = 1, 1, 2, 20
_LAST_LINES = 8


class ProfileRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, for how long, and where the run folder goes."""

    command: tuple[str, ...]
    folder: str
    cwd: str
    limit_s: float


class ProfiledScript(msgspec.Struct, frozen=True, kw_only=True):
    """How profiling a script ended. A run whose lines were captured counts, whatever came after."""

    run: str | None = None  # the run folder, once it shows lines
    failed: str | None = None  # why there is none
    output: tuple[str, ...] = ()  # the last lines of the script's output, if it failed
    took_s: float = 0.0


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ProfileRequest)
    os.chdir(request.cwd)
    answer = profile(request)
    sys.stdout.buffer.write(msgspec.json.encode(answer))


def profile(request: ProfileRequest) -> ProfiledScript:
    """Run the command until enough steps were seen, it ends, or its time is up."""
    folder = Path(request.folder)
    settings = Settings(
        folder=request.folder,
        wait=WAIT,
        warmup=WARMUP,
        active=ACTIVE,
        lines=True,
        script_facts=True,
        sample_hz=0.0,
        stop_after=STEPS,
    )
    began, parent = time.monotonic(), os.getppid()
    try:
        end, ranks = capture_to_end(
            request.command,
            folder,
            settings,
            limit_s=request.limit_s,
            enough=lambda: _is_enough(folder, parent),
        )
    except StepscopeError as error:
        return ProfiledScript(failed=str(error), took_s=time.monotonic() - began)
    took_s = time.monotonic() - began
    if any("trace-lines.json.gz" in rank["captured"] for rank in ranks):
        return ProfiledScript(run=request.folder, took_s=took_s)
    steps = max((rank.get("steps") or 0 for rank in ranks), default=0)
    return ProfiledScript(
        failed=_why(request, end.code, too_long=end.too_long, steps=steps),
        output=tuple(last_lines(folder, _LAST_LINES)),
        took_s=took_s,
    )


def _is_enough(folder: Path, parent: int) -> bool:
    """Return whether all steps were seen. Raises SystemExit once nobody waits for the answer."""
    if os.getppid() != parent:
        raise SystemExit(1)
    return any(folder.glob(f"rank-*/{ENOUGH}"))


def _why(request: ProfileRequest, code: int, *, too_long: bool, steps: int) -> str:
    name = shlex.join(request.command)
    if too_long:
        limit = long_duration(request.limit_s * 1e9)
        return (
            f"{name} was stopped after {limit}, in training step {steps}. stepscope records lines "
            "in steps 8 and 9: allow more time, or give the script less work before them"
        )
    if code:
        return f"{name} ended with exit code {code} in training step {steps}"
    if not steps:
        return f"{name} ended without a training step: no optimizer stepped"
    return f"{name} ended after {steps} training steps, but lines are recorded in steps 8 and 9"


if __name__ == "__main__":
    main()


# Profiles a script from any thread of an editor's server, within a time limit.

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
        cwd=str(script.parent),
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
    """Wait until the child ends; return why it has to be ended, if it does not."""
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
    """Tell how far it is, by the files of the run."""
    if any(folder.glob("rank-*/lines.json")):
        return "lines recorded; timing steps without the profiler"
    steps = max((_last_step(file) for file in folder.glob("rank-*/steps.jsonl")), default=None)
    return "starting the script" if steps is None else f"training: {counted(steps, 'step')}"


def _last_step(file: Path) -> int:
    with contextlib.suppress(UnreadableInputError, ValueError, KeyError, IndexError):
        lines = read_tail(file, _LAST_BYTES).splitlines()
        last = msgspec.json.decode(lines[-1])
        return int(last["step"]) + int(last.get("steps", 1))
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
