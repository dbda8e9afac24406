"""Runs a command to its end, with its output in a file, and leaves no process running.

The command gets a session of its own. However stepscope ends, it ends the command's processes too:
its group, and every process with this start's mark in its environment (a launcher's workers have
other groups). If stepscope itself is killed, a warden does it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.trace.regular_files import read_start, read_tail
from stepscope.ui.job_environment import job_environment
from stepscope.ui.job_process import raising_on_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import IO, NoReturn

    from stepscope.measure.settings import Settings

OUTPUT = "output.txt"
_GRACE_S, _GRACE_ALONE_S, _LOOK_S = 5.0, 0.5, 0.05
_LAST_BYTES = 16 << 10
_MOST_ENVIRONMENT = 8 << 20  # bytes; systems allow a quarter of that
_AFTER_ENOUGH_S = 20.0
_STARTING_S = 1.0
_DISMISSED = b"."
_STARTED = "STEPSCOPE_STARTED"  # tells a command from the next one with the same folder
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnd:
    """How a command ended; a signal's number is added to 128."""

    code: int
    too_long: bool = False  # it was ended because its time was up


def run_to_end(
    command: Sequence[str],
    settings: Settings,
    folder: Path,
    *,
    limit_s: float | None = None,
    enough: Callable[[], bool] | None = None,
) -> CommandEnd:
    """A signal that would end stepscope ends the command first, and then raises SystemExit.

    A command that has not ended some time after `enough` is true is ended; that is no failure.
    """
    stop = raising_on_signals(_ENDING[1:], lambda number: SystemExit(128 + number))
    processes: _Processes | None = None
    mark = f"{os.getpid()}-{time.time_ns()}"
    with (folder / OUTPUT).open("wb") as output, stop, _Warden(mark) as warden:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            try:
                environment = {**job_environment(settings, command), _STARTED: mark}
                process = _start(command, environment, output, mask)
                warden.tell_group(process.pid)
                processes = _Processes(process.pid, mark, lambda: process.poll() is not None)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what came meanwhile raises here
            return _wait(process, limit_s, enough)
        finally:
            if processes is not None:
                _end_undisturbed(processes)
            warden.dismiss()


def _start(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes],
    mask: set[int | signal.Signals],
) -> subprocess.Popen[bytes]:
    """With the signals that we hold back let through, as `mask` has them."""
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
        )
    except FileNotFoundError:
        raise UsageError(f"{command[0]}: no such command") from None
    except OSError as error:
        raise UsageError(f"{shlex.join(command)}: {error.strerror}") from None


def _end_undisturbed(processes: _Processes) -> None:
    """A second Ctrl-C must not leave a process running."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        processes.end()
    finally:
        signal.signal(signal.SIGINT, before)


def last_lines(folder: Path, count: int) -> list[str]:
    """Of the command's output; empty if there is none."""
    try:
        text = read_tail(folder / OUTPUT, _LAST_BYTES).decode(errors="replace")
    except UnreadableInputError:
        return []
    return text.splitlines()[-count:]


def _wait(
    process: subprocess.Popen[bytes], limit_s: float | None, enough: Callable[[], bool] | None
) -> CommandEnd:
    began = time.monotonic()
    until = began + limit_s if limit_s is not None else float("inf")
    seen_enough = False
    while True:
        left = until - time.monotonic()
        if left <= 0:
            return CommandEnd(code=0) if seen_enough else CommandEnd(code=1, too_long=True)
        watched = limit_s is not None or enough is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(min(0.5, left) if watched else None)
            return CommandEnd(code=code if code >= 0 else 128 - code)
        if enough is not None and not seen_enough and enough():
            seen_enough, until = True, min(until, time.monotonic() + _AFTER_ENOUGH_S)


@dataclass(frozen=True, slots=True)
class _Processes:
    """All processes of one command: its group, and those that carry its mark."""

    group: int
    mark: str
    leader_has_ended: Callable[[], bool]

    def end(self) -> None:
        """SIGINT first, then SIGTERM and SIGKILL; nothing if all have ended already."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if not self._alive():
                return
            self._signal(number)
            self._wait_for_end()

    def _wait_for_end(self) -> None:
        """Processes that outlive the command get less time: nobody passed the signal on to them."""
        until, alone = time.monotonic() + _GRACE_S, False
        while time.monotonic() < until and self._alive():
            if not alone and self.leader_has_ended():
                until, alone = min(until, time.monotonic() + _GRACE_ALONE_S), True
            time.sleep(_LOOK_S)

    def _alive(self) -> bool:
        return not self.leader_has_ended() or _group_lives(self.group) or bool(self._carriers())

    def _signal(self, number: signal.Signals) -> None:
        if self.group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group, number)
        if self.leader_has_ended() or number == signal.SIGKILL:
            for pid in self._carriers():  # a launcher that is still alive ends its workers itself
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    def _carriers(self) -> list[int]:
        """Known on Linux only."""
        mark = f"{_STARTED}={self.mark}".encode()
        pids = []
        for place in Path("/proc").glob("[0-9]*"):
            if int(place.name) == os.getpid():
                continue
            with contextlib.suppress(UnreadableInputError):  # it has ended, or is not ours
                if mark in read_start(place / "environ", _MOST_ENVIRONMENT):
                    pids.append(int(place.name))
        return pids


def _group_lives(group: int) -> bool:
    if not group:
        return False
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


class _Warden:
    """A second process that watches us: unless it is dismissed, it ends the command.

    It is not dismissed if we are killed, or if a signal cuts the command's end short."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._pid = 0  # none could be started: the command is then ended by us alone
        self._tells = -1

    def __enter__(self) -> _Warden:
        try:
            hears, self._tells = os.pipe()
        except OSError:
            return self
        try:
            self._pid = os.fork()
        except OSError:
            os.close(hears)
            return self
        if self._pid == 0:
            os.close(self._tells)
            _guard(hears, self._mark)
        os.close(hears)
        return self

    def tell_group(self, group: int) -> None:
        self._tell(b"%d\n" % group)

    def dismiss(self) -> None:
        self._tell(_DISMISSED)

    def __exit__(self, *_: object) -> None:
        if self._tells >= 0:
            os.close(self._tells)
        if self._pid > 0:
            with contextlib.suppress(OSError):
                os.waitpid(self._pid, 0)

    def _tell(self, message: bytes) -> None:
        if self._pid > 0:
            with contextlib.suppress(OSError):
                os.write(self._tells, message)


def _guard(hears: int, mark: str) -> NoReturn:
    """Runs in the warden, which keeps no file of ours open and skips our exit handlers."""
    try:
        os.setsid()
        for number in (*_ENDING, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            os.closerange(0, hears)
            os.closerange(hears + 1, 4096)
        heard = b""
        while block := os.read(hears, 64):
            heard += block
        if not heard.endswith(_DISMISSED):
            group = int(heard) if heard.strip() else 0
            if not group:
                time.sleep(_STARTING_S)  # the command may be about to start
            _Processes(group, mark, lambda: not _group_lives(group)).end()
    finally:
        os._exit(0)
