"""The command as a child process: started so that it loads stepscope, then watched to its end.

Every signal we get is meant for the command. One that was sent to the whole process group has
reached the command already; any other is passed on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import signal
import subprocess
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from stepscope.errors import UsageError
from stepscope.measure import folder as layout
from stepscope.ui.group_sentinel import GroupSentinel
from stepscope.ui.job_environment import job_environment
from stepscope.ui.say import say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

    from stepscope.measure.settings import Settings

_POLL_S, _GRACE_S = 0.2, 15.0
# Stopping, continuing and window sizes concern a terminal's whole group; the others come from a
# program's own faults.
_OWN = "KILL STOP TSTP CONT TTIN TTOU CHLD WINCH URG SEGV BUS FPE ILL TRAP SYS ABRT PIPE XCPU XFSZ"
_NOT_PASSED_ON = {getattr(signal, f"SIG{name}", None) for name in _OWN.split()}
_NO_SECOND_PROCESS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class News(Protocol):
    """Has something to report while the command runs."""

    done: bool

    def news(self) -> str | None: ...


class Diary(Protocol):
    """Records what happens to the command."""

    def heard(self, number: int) -> None: ...

    def handed_over(self) -> None: ...


def run_job(
    command: Sequence[str],
    settings: Settings | None,
    *,
    output: int | None = None,
    until: Callable[[], bool] | None = None,
    news: News | None = None,
    diary: Diary | None = None,
    signals: HeldSignals | None = None,
) -> int:
    """The command's exit code; 128 plus the signal's number if a signal ended it.

    Once `until` returns True, the command is ended, which is no failure. `signals` are signals that
    the caller holds back already.
    """
    with nullcontext(signals) if signals is not None else HeldSignals() as held:
        held.diary = diary
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
        self.diary: Diary | None = None
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
            self._drop_late()
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
        if self.diary is not None:
            self.diary.handed_over()
        if output is not None:
            os.dup2(output, 1)
        self._restore_signals()
        with contextlib.suppress(OSError):
            os.execvpe(command[0], list(command), job_environment(settings, command))

    def _restore_signals(self) -> None:
        """In the child, before the command starts: restore the signals."""
        signal.signal(signal.SIGCHLD, self._ended_unseen)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def wait(self, timeout_s: float | None) -> None:
        """Until a child ends or the time is up; signals that arrive meanwhile are passed on."""
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
        if self.diary is not None:
            self.diary.heard(number)

    def _drop_late(self) -> None:
        """Signals that arrived while the command ended were meant for it, not for the report."""
        while signal.sigtimedwait({*self._held, signal.SIGCHLD}, 0) is not None:
            pass


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
    """The command's exit code; `news` is printed meanwhile."""
    while process.poll() is None:
        signals.wait(_POLL_S if news is not None and not news.done else None)
        if news is None or process.poll() is not None:
            continue
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
    """The command's exit code, or 0 if it was ended because enough was seen."""
    while not enough():
        signals.wait(_POLL_S)
        if process.poll() is not None:
            return process.wait()
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
            break
    return 0
