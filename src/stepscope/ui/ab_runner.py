"""Runs one command of `ab`, captures its steps, and leaves no process running.

The command gets a session of its own. However stepscope ends, it ends the command's processes too:
its group, and every process with this run's folder in its environment (a launcher's workers have
other groups).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stepscope
from stepscope.errors import NotCapturedError, UnreadableInputError, UsageError
from stepscope.measure import folder as layout
from stepscope.measure.settings import Settings
from stepscope.trace.regular_files import read_start, read_tail
from stepscope.ui.job_environment import job_environment
from stepscope.ui.job_process import raising_on_signals
from stepscope.ui.run_folder import describe_end, describe_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

OUTPUT = "output.txt"
NEVER = 1_000_000_000  # a step that no training reaches
_GRACE_S, _GRACE_ALONE_S, _LOOK_S = 5.0, 0.5, 0.05
_LAST_LINES, _LAST_BYTES = 5, 16 << 10
_MOST_ENVIRONMENT = 8 << 20  # bytes; systems allow a quarter of that


def capture_run(command: Sequence[str], folder: Path, *, step_on: str, window: int | None) -> None:
    """Run it to its end into a new run folder; raises NotCapturedError if it failed or had no step.

    Only steps are captured; with `window`, also memory and a trace after that many steps.
    """
    folder.mkdir(parents=True)
    settings = Settings(
        folder=str(folder.absolute()),
        wait=NEVER if window is None else window,
        memory=window is not None,
        sample_hz=0.0,
        step_on=step_on,
    )
    began = time.time()
    code = _run(command, settings, folder)
    ranks = describe_ranks(folder, settings)
    if window is None:
        for rank in ranks:
            rank["missing"] = {layout.TRACE: "only steps were captured"}
    layout.write_json(folder / layout.RUN, _run_json(command, settings, began, code, ranks))
    _check(command, folder, code, ranks)


def _run(command: Sequence[str], settings: Settings, folder: Path) -> int:
    # A signal that would end stepscope raises instead, so that the command is ended first.
    ending = (signal.SIGTERM, signal.SIGHUP)
    stop = raising_on_signals(ending, lambda number: SystemExit(128 + number))
    with (folder / OUTPUT).open("wb") as output, stop:
        try:
            process = subprocess.Popen(
                command,
                env=job_environment(settings),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise UsageError(f"{command[0]}: no such command") from None
        except OSError as error:
            raise UsageError(f"{shlex.join(command)}: {error.strerror}") from None
        try:
            code = process.wait()
        finally:
            _end(process, settings.folder)
    return code if code >= 0 else 128 - code


def _end(process: subprocess.Popen[bytes], folder: str) -> None:
    """SIGINT first, then SIGTERM and SIGKILL; nothing if all processes have ended already."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if not _alive(process, folder):
                return
            _signal(process, folder, number)
            _wait_for_end(process, folder)
    finally:
        signal.signal(signal.SIGINT, before)


def _wait_for_end(process: subprocess.Popen[bytes], folder: str) -> None:
    """Processes that outlive the command get less time: nobody passed the signal on to them."""
    until, alone = time.monotonic() + _GRACE_S, False
    while time.monotonic() < until and _alive(process, folder):
        if not alone and process.poll() is not None:
            until, alone = min(until, time.monotonic() + _GRACE_ALONE_S), True
        time.sleep(_LOOK_S)


def _alive(process: subprocess.Popen[bytes], folder: str) -> bool:
    return process.poll() is None or _group_lives(process.pid) or bool(_carriers(folder))


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _signal(process: subprocess.Popen[bytes], folder: str, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
    if process.poll() is not None or number == signal.SIGKILL:
        for pid in _carriers(folder):  # a launcher that is still alive ends its workers itself
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def _carriers(folder: str) -> list[int]:
    """Processes with this run's folder in their environment; known on Linux only."""
    mark = f'"folder":{json.dumps(folder)}'.encode()  # as Settings.to_environment writes it
    pids = []
    for place in Path("/proc").glob("[0-9]*"):
        if int(place.name) == os.getpid():
            continue
        with contextlib.suppress(UnreadableInputError):  # it has ended, or is not ours
            if mark in read_start(place / "environ", _MOST_ENVIRONMENT):
                pids.append(int(place.name))
    return pids


def _run_json(
    command: Sequence[str], settings: Settings, began: float, code: int, ranks: list[dict[str, Any]]
) -> dict[str, Any]:
    """run.json as `run` writes it."""
    return {
        "schema": layout.SCHEMA,
        "stepscope": stepscope.__version__,
        "command": list(command),
        "folder": str(Path.cwd()),
        "started_unix": began,
        "step_on": settings.step_on,
        **describe_end(code, ranks),
    }


def _check(command: Sequence[str], folder: Path, code: int, ranks: list[dict[str, Any]]) -> None:
    output = folder / OUTPUT
    if code:
        raise NotCapturedError(
            f"{shlex.join(command)} ended with exit code {code}: nothing was compared. "
            f"Its output is in {output}{_last_lines(output)}"
        )
    if not ranks:
        raise NotCapturedError(
            f"{shlex.join(command)}: no training step was seen. If it trains without a torch "
            f"optimizer, try --step-on dataloader (or forward). Its output is in {output}"
        )


def _last_lines(output: Path) -> str:
    try:
        text = read_tail(output, _LAST_BYTES).decode(errors="replace")
    except UnreadableInputError:
        return ""
    lines = text.splitlines()[-_LAST_LINES:]
    return "".join(f"\n  {line}" for line in lines)
