"""Which process wrote a file, so that a later reader can see whether it still runs.

Process numbers are reused: the start time, the boot and the namespace of the number distinguish
processes. Linux reports all of them; unknown values are None.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["running", "gone", "restarted", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """One process of one machine, from one boot to the next."""

    pid: int
    host: str
    started_ticks: int | None = None  # since the machine's start
    boot: str | None = None
    namespace: str | None = None  # of `pid`: containers have their own


def this_process() -> ProcessIdentity:
    """Never raises."""
    pid = os.getpid()
    return ProcessIdentity(
        pid=pid,
        host=os.uname().nodename,
        started_ticks=_started_ticks(pid),
        boot=_boot(),
        namespace=_namespace(),
    )


def process_state(process: ProcessIdentity) -> State:
    """Whether it runs now; "unknown" on another machine or in another container."""
    if process.host != os.uname().nodename or process.boot is None:
        return "unknown"
    if process.boot != _boot():
        return "restarted"
    if process.started_ticks is None or process.namespace != _namespace():
        return "unknown"
    return "running" if _started_ticks(process.pid) == process.started_ticks else "gone"


def is_alive(pid: int) -> bool:
    """Whether a process of this machine has this number and is not a zombie."""
    return _started_ticks(pid) is not None if Path("/proc/self/stat").exists() else True


def _started_ticks(pid: int) -> int | None:
    """None for a process that does not exist or has ended (a zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *numbers = text.rpartition(b")")[2].split()  # a name may hold brackets and spaces
    return None if state in (b"Z", b"X") else int(numbers[18])


def _boot() -> str | None:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def _namespace() -> str | None:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - not the path of a file
    return None
