"""Run a command as a child process that loads stepscope, watch it to its end, and leave no
process of it running.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, NoReturn, Protocol

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.measure import folder as layout
from stepscope.trace.files import read_start, read_tail
from stepscope.ui.jobs.environment import job_environment
from stepscope.ui.say import say

if TYPE_CHECKING:
    from stepscope.measure.settings import Settings
    from stepscope.ui.jobs.run_folder import CommandRecord

# Every signal we get is meant for the command. One that was sent to the whole process group has
# reached the command already; any other is passed on.

POLL_S, _GRACE_S = 0.2, 15.0
# Stopping, continuing and window sizes concern a terminal's whole group; the others come from a
# program's own faults.
_OWN = "KILL STOP TSTP CONT TTIN TTOU CHLD WINCH URG SEGV BUS FPE ILL TRAP SYS ABRT PIPE XCPU XFSZ"
_NOT_PASSED_ON = {getattr(signal, f"SIG{name}", None) for name in _OWN.split()}
_NO_SECOND_PROCESS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class News(Protocol):
    """Has something to report while the command runs."""

    done: bool

    @property
    def pause_s(self) -> float:
        """Between two questions."""

    @property
    def gives_up(self) -> bool:
        """Whether the command hangs and has to be ended."""

    def news(self) -> str | None: ...


def run_job(
    command: Sequence[str],
    settings: Settings | None,
    *,
    output: int | None = None,
    until: Callable[[], bool] | None = None,
    news: News | None = None,
    record: CommandRecord | None = None,
    signals: HeldSignals | None = None,
) -> int:
    """Return the command's exit code; 128 plus the signal's number if a signal ended it.

    Once `until` returns True, the command is ended, which is no failure. `signals` are signals that
    the caller holds back already.
    """
    with nullcontext(signals) if signals is not None else HeldSignals() as held:
        held.record = record
        process = held.start(command, settings, output, own_session=until is not None)
        code = _wait_until(process, until, held) if until else _wait(process, news, held)
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def raising_on_signals(
    numbers: Iterable[int], error: Callable[[int], BaseException]
) -> Iterator[None]:
    """Meanwhile these signals raise an error."""

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        raise error(number)

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class HeldSignals:
    """Holds signals back from before the command starts until after it has ended."""

    def __init__(self) -> None:
        held = {number for number in signal.valid_signals() if number not in _NOT_PASSED_ON}
        self._held = {n for n in held if signal.getsignal(n) != signal.SIG_IGN}
        self.record: CommandRecord | None = None
        self._sentinel: GroupSentinel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._own_session = False

    def __enter__(self) -> HeldSignals:
        self._ended_unseen = signal.getsignal(signal.SIGCHLD)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else the exit code is lost
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*self._held, signal.SIGCHLD})
        return self

    def __exit__(self, *_: object) -> None:
        if self._sentinel is not None:
            self._sentinel.close()
        if self._process is not None:
            # Signals that arrived while the command ended were meant for it, not for the report.
            while signal.sigtimedwait({*self._held, signal.SIGCHLD}, 0) is not None:
                pass
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.signal(signal.SIGCHLD, self._ended_unseen)

    def start(
        self,
        command: Sequence[str],
        settings: Settings | None,
        output: int | None,
        *,
        own_session: bool,
    ) -> subprocess.Popen[bytes]:
        self._own_session = own_session
        if not own_session:
            self._sentinel = GroupSentinel.start(self._held)
        options = {"stdout": output, "start_new_session": own_session}
        try:
            self._process = _start(command, settings, preexec_fn=self._restore_signals, **options)
        except OSError as error:
            self._become(command, settings, output, error)
            raise UsageError(f"{shlex.join(command)}: {error.strerror}") from None
        return self._process

    def _become(
        self, command: Sequence[str], settings: Settings | None, output: int | None, why: OSError
    ) -> None:
        """If no second process can be started, the command replaces ours."""
        if why.errno not in _NO_SECOND_PROCESS:
            return
        say(
            f"stepscope cannot start a second process ({layout.why_refused(why)}): the command "
            "takes its place, and nothing is explained at the end"
        )
        if self.record is not None:
            self.record.handed_over()
        if output is not None:
            os.dup2(output, 1)
        self._restore_signals()
        with contextlib.suppress(OSError):
            os.execvpe(command[0], list(command), job_environment(settings, command))

    def _restore_signals(self) -> None:
        """Restore the signals, in the child, before the command starts."""
        signal.signal(signal.SIGCHLD, self._ended_unseen)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until a child ends or the time is up; pass on signals that arrive meanwhile."""
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            number = self._next(None if ends is None else max(0.0, ends - time.monotonic()))
            if number is None or number == signal.SIGCHLD:
                return
            self._pass_on(number)

    def _next(self, timeout_s: float | None) -> int | None:
        watched = {*self._held, signal.SIGCHLD}
        if timeout_s is None:
            return int(signal.sigwait(watched))
        info = signal.sigtimedwait(watched, timeout_s)
        return None if info is None else int(info.si_signo)

    def _pass_on(self, number: int) -> None:
        process = self._process
        assert process is not None
        reached = self._sentinel is not None and self._sentinel.heard(number)
        if not reached:
            with contextlib.suppress(OSError):
                if self._own_session:
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)
        if self.record is not None:
            self.record.heard(number)


def _start(
    command: Sequence[str], settings: Settings | None, **options: Any
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, env=job_environment(settings, command), **options)
    except FileNotFoundError:
        raise UsageError(f"{command[0]}: no such command") from None
    except OSError as error:
        if error.errno == errno.E2BIG and settings is not None:
            say("nothing is captured: the environment has no room for stepscope's settings")
            return _start(command, None, **options)
        raise


def _wait(process: subprocess.Popen[bytes], news: News | None, signals: HeldSignals) -> int:
    """Return the command's exit code; `news` is printed meanwhile."""
    while process.poll() is None:
        signals.wait(news.pause_s if news is not None and not news.done else None)
        if news is None or process.poll() is not None:
            continue
        if news.gives_up:
            _end(process, process.send_signal)
            break
        try:
            sentence = news.news()
        except Exception:  # the command goes on whatever happens here
            news = None
            continue
        if sentence:
            say(sentence)
    return process.wait()


def _wait_until(
    process: subprocess.Popen[bytes], enough: Callable[[], bool], signals: HeldSignals
) -> int:
    """Return the command's exit code, or 0 if it was ended because enough was seen."""
    while not enough():
        signals.wait(POLL_S)
        if process.poll() is not None:
            return process.wait()
    _end(process, partial(os.killpg, process.pid))
    return 0


def _end(process: subprocess.Popen[bytes], send: Callable[[int], object]) -> None:
    """SIGTERM, and SIGKILL if that does not help."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            send(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
            break


# Runs a command to its end, with its output in a file, and leaves no process running.
#
# The command gets a session of its own. However stepscope ends, it ends the command's processes
# too: its group, and every process with this start's mark in its environment (a launcher's workers
# have other groups). If stepscope itself is killed, a warden does it.

OUTPUT = "output.txt"
_GRACE_OF_ALL_S, _GRACE_ALONE_S, _LOOK_S = 5.0, 0.5, 0.05
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
                process = _start_held(command, environment, output, mask)
                warden.tell_group(process.pid)
                processes = _Processes(process.pid, mark, lambda: process.poll() is not None)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what came meanwhile raises here
            return _wait_until_end(process, limit_s, enough)
        finally:
            if processes is not None:
                _end_undisturbed(processes)
            warden.dismiss()


def _start_held(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes],
    mask: set[int | signal.Signals],
) -> subprocess.Popen[bytes]:
    """Start it with the signals that we hold back let through, as `mask` has them."""
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
    """End them: a second Ctrl-C must not leave a process running."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        processes.end()
    finally:
        signal.signal(signal.SIGINT, before)


def last_lines(folder: Path, count: int) -> list[str]:
    """Return the last lines of the command's output; none if there is none."""
    try:
        text = read_tail(folder / OUTPUT, _LAST_BYTES).decode(errors="replace")
    except UnreadableInputError:
        return []
    return text.splitlines()[-count:]


def _wait_until_end(
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
            if self.group:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.group, number)
            # A launcher that is still alive ends its workers itself.
            if self.leader_has_ended() or number == signal.SIGKILL:
                for pid in self._carriers():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
            # Processes that outlive the command get less time: nobody passed the signal on to them.
            until, alone = time.monotonic() + _GRACE_OF_ALL_S, False
            while time.monotonic() < until and self._alive():
                if not alone and self.leader_has_ended():
                    until, alone = min(until, time.monotonic() + _GRACE_ALONE_S), True
                time.sleep(_LOOK_S)

    def _alive(self) -> bool:
        return not self.leader_has_ended() or _group_lives(self.group) or bool(self._carriers())

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


# A second process in our process group: it shows whether a signal was sent to all or only to us.
#
# The system does not say who else got a signal. Ctrl-C, a closed terminal and a signal to the group
# reach the command directly, and passing them on would interrupt it twice.

_PATIENCE_S = 0.1


class GroupSentinel:
    """A process that only reports the signals it gets."""

    def __init__(self, pid: int, reports: int, life: int) -> None:
        self._pid = pid
        self._reports = reports
        self._life = life  # the process ends when this end of a pipe closes, however we end
        self._early: list[int] = []

    @classmethod
    def start(cls, numbers: Iterable[int]) -> GroupSentinel | None:
        """Start one, or return None. `numbers` are blocked, so that none is missed."""
        try:
            pipes = [os.pipe(), os.pipe()]
            pid = os.fork()
        except OSError:
            return None
        (reports, reporting), (living, life) = pipes
        if pid == 0:
            os.close(reports)
            os.close(life)
            _listen(set(numbers), reporting, living)
        os.close(reporting)
        os.close(living)
        return cls(pid, reports, life)

    def heard(self, number: int) -> bool:
        """Return whether the signal that we just got has reached it too."""
        until = time.monotonic() + _PATIENCE_S
        while number not in self._early:
            ready, _, _ = select.select([self._reports], [], [], max(0.0, until - time.monotonic()))
            reported = os.read(self._reports, 64) if ready else b""
            if not reported:
                return False
            self._early += reported
        self._early.remove(number)
        return True

    def close(self) -> None:
        os.close(self._life)
        os.close(self._reports)
        with contextlib.suppress(OSError):
            os.waitpid(self._pid, 0)


def _listen(numbers: set[int], reporting: int, living: int) -> NoReturn:
    """Runs in the sentinel, which keeps no file of ours open and skips our exit handlers."""
    try:
        with contextlib.suppress(OSError):
            os.closerange(0, min(reporting, living))
        for number in numbers:
            signal.signal(number, lambda *_: None)
        os.set_blocking(reporting, False)
        signal.set_wakeup_fd(reporting, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        while not select.select([living], [], [])[0]:
            pass
    finally:
        os._exit(0)


# A child that answers one line with one line, and its end with that of its own children.

_PIECE = 1 << 16
_MOST_ANSWER = 64 << 20


def ask_line(child: subprocess.Popen[bytes], line: bytes, limit_s: float) -> bytes:
    """Send one line, wait for one. TimeoutError when late, OSError when the child has died."""
    if child.stdin is None or child.stdout is None or child.stdin.closed:
        raise BrokenPipeError
    child.stdin.write(line)
    child.stdin.flush()
    pieces: list[bytes] = []
    end = time.monotonic() + limit_s
    size = 0
    while True:
        left = end - time.monotonic()
        if left <= 0 or not select.select([child.stdout], [], [], left)[0]:
            raise TimeoutError
        piece = os.read(child.stdout.fileno(), _PIECE)
        size += len(piece)
        if not piece or size > _MOST_ANSWER:
            raise BrokenPipeError
        pieces.append(piece)
        if piece.endswith(b"\n"):
            return b"".join(pieces)


def kill_group(leader: int) -> None:
    """Kill a process that started a session of its own, with all that it started."""
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)


def end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the child's group, take its exit code, and close its pipes."""
    kill_group(child.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(10)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
