"""One fresh process, measured from outside: wall time, CPU time, peak memory.

The measuring process must stay small (no numpy, no rich): on Linux, a child's peak memory starts at
what its parent held when it was spawned.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# As an installed package runs: compiled once, without the caller's settings.
_DROPPED = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHONPROFILEIMPORTTIME")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one process needed, and what it printed."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    failure: str | None  # the error's last line
    output: str


def environment(**changes: str | None) -> dict[str, str]:
    """The caller's environment with changes; None removes a variable."""
    made: dict[str, Any] = {**os.environ, **dict.fromkeys(_DROPPED), **changes}
    return {name: value for name, value in made.items() if value is not None}


def run(
    command: Sequence[str], env: Mapping[str, str], *, keep_output: bool, timeout_s: float
) -> Run:
    """Run to the end or to the time limit."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.perf_counter()
        child = subprocess.Popen(
            command, env=env, stdout=out if keep_output else subprocess.DEVNULL, stderr=err
        )
        expired = threading.Event()
        guard = threading.Timer(timeout_s, _stop, (child, expired))
        guard.start()
        _, status, usage = os.wait4(child.pid, 0)
        wall_s = time.perf_counter() - began
        guard.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        failure = None
        if expired.is_set():
            failure = f"stopped after {timeout_s:.0f} s"
        elif child.returncode:
            failure = last_line(err.read().decode("utf-8", "replace")) or f"exit code {status}"
        return Run(
            wall_s=wall_s,
            cpu_s=usage.ru_utime + usage.ru_stime,
            peak_bytes=usage.ru_maxrss * 1024,
            failure=failure,
            output=out.read().decode("utf-8", "replace"),
        )


def _stop(child: subprocess.Popen[bytes], expired: threading.Event) -> None:
    expired.set()
    child.kill()


def last_line(text: str) -> str:
    """The line of a traceback that says what happened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
