"""A second process in our process group: it shows whether a signal was sent to all or only to us.

The system does not say who else got a signal. Ctrl-C, a closed terminal and a signal to the group
reach the command directly, and passing them on would interrupt it twice.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import NoReturn

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
        """None if no process can be started. `numbers` are blocked, so that none is missed."""
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
        """Whether the signal that we just got has reached it too."""
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
