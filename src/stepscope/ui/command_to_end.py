"""Runs a command to its end, with its output in a file, and leaves no process running.

The command gets a session of its own. However stepscope ends, it ends the command's processes too:
its group, and every process with this run's folder in its environment (a launcher's workers have
other groups). If stepscope itself is killed, a warden does it.
"""

from __future__ import annotations

import contextlib
import json
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
    from collections.abc import Callable, Iterator, Sequence
    from typing import NoReturn

    from stepscope.measure.settings import Settings

OUTPUT = "output.txt"
_GRACE_S, _GRACE_ALONE_S, _LOOK_S = 5.0, 0.5, 0.05
_LAST_BYTES = 16 << 10
_MOST_ENVIRONMENT = 8 << 20  # bytes; systems allow a quarter of that
_AFTER_ENOUGH_S = 20.0
_ALL_IS_WELL = b"."


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
    ending = (signal.SIGTERM, signal.SIGHUP)
    stop = raising_on_signals(ending, lambda number: SystemExit(128 + number))
    mark = str(Path(settings.folder))
    with (folder / OUTPUT).open("wb") as output, stop, _warden(mark) as guard:
        try:
            process = subprocess.Popen(
                command,
                env=job_environment(settings, command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise UsageError(f"{command[0]}: no such command") from None
        except OSError as error:
            raise UsageError(f"{shlex.join(command)}: {error.strerror}") from None
        processes = _Processes(process.pid, mark, lambda: process.poll() is not None)
        try:
            guard(process.pid)
            end = _wait(process, limit_s, enough)
        finally:
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                processes.end()
            finally:
                signal.signal(signal.SIGINT, before)
    return end


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
    """All processes of one command: its group, and those that carry its folder's name."""

    group: int
    folder: str
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
        """Processes with this run's folder in their environment; known on Linux only."""
        # As Settings.to_environment writes it.
        mark = f'"folder":{json.dumps(self.folder)}'.encode()
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


@contextlib.contextmanager
def _warden(folder: str) -> Iterator[Callable[[int], None]]:
    """Meanwhile a second process watches us: should we be killed, it ends the command.

    Gives a function that tells it the command's group."""
    try:
        hears, tells = os.pipe()
    except OSError:
        yield lambda _group: None
        return
    try:
        pid = os.fork()
    except OSError:  # the command is then ended by us alone
        os.close(hears)
        pid = -1
    if pid == 0:
        os.close(tells)
        _guard(hears, folder)
    if pid > 0:
        os.close(hears)
    try:
        yield (lambda group: _tell(tells, b"%d\n" % group)) if pid > 0 else lambda _group: None
    finally:
        if pid > 0:
            _tell(tells, _ALL_IS_WELL)
        os.close(tells)
        if pid > 0:
            with contextlib.suppress(OSError):
                os.waitpid(pid, 0)


def _tell(pipe: int, message: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(pipe, message)


def _guard(hears: int, folder: str) -> NoReturn:
    """Runs in the warden, which keeps no file of ours open and skips our exit handlers."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            os.closerange(0, hears)
            os.closerange(hears + 1, 4096)
        heard = b""
        while block := os.read(hears, 64):
            heard += block
        if not heard.endswith(_ALL_IS_WELL):
            group = int(heard) if heard.strip() else 0
            _Processes(group, folder, lambda: not _group_lives(group)).end()
    finally:
        os._exit(0)
