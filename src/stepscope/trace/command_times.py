"""When the command of a rank began and ended: its host's file in hosts/, else run.json.

Each host writes the times of its own clock. A run without files of hosts has one command.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec

from stepscope.records.host_names import HOSTS
from stepscope.records.process_identity import ProcessIdentity  # noqa: TC001  (decoded)
from stepscope.trace.decode import Oddities
from stepscope.trace.host_files import read_host_runs
from stepscope.trace.run_state import RUN
from stepscope.trace.side_files import read_record

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.records.host_run import HostRun

_LATEST_S = 1e10
_MOST_BYTES = 64 << 20  # of run.json, which lists every rank
_KEPT = 16


class CommandTimes(msgspec.Struct, frozen=True):
    """Unix times in seconds; those that make no sense are None."""

    started_unix: float | None = None
    ended_unix: float | None = None
    process: ProcessIdentity | None = None

    @property
    def host(self) -> str | None:
        """Whose clock it is, if that is not the rank's own."""
        return self.process.host if self.process else None

    @property
    def began_ns(self) -> int | None:
        return _unix_ns(self.started_unix)

    @property
    def ended_ns(self) -> int | None:
        return _unix_ns(self.ended_unix)


def read_command_times(run: Path, host: str | None, process_began_ns: int | None) -> CommandTimes:
    """Of the command that started this process on this host."""
    by_host = _host_runs(run, _stamp(run / HOSTS))
    own = by_host.get(host or "")
    elsewhere = own is None  # started from another host, as by srun in a batch script
    if own is None:
        own = [one for runs in by_host.values() for one in runs]
    started = [
        one
        for one in own
        if process_began_ns is None or (one.started_unix or 0) * 1e9 <= process_began_ns
    ]
    if started or own:
        times = _span(started or own)
        process = (started or own)[0].process if elsewhere and len(by_host) == 1 else None
        return msgspec.structs.replace(times, process=process)
    return _run_times(run / RUN, _stamp(run / RUN))


def _span(runs: Sequence[HostRun]) -> CommandTimes:
    """Of the last attempt among them: the first start and the last end of its commands."""
    last = max(run.attempt for run in runs)
    current = [run for run in runs if run.attempt == last]
    starts = [run.started_unix for run in current if run.started_unix is not None]
    ends = [run.ended_unix for run in current if run.ended_unix is not None]
    over = len(ends) == len(current)  # no end while one of the commands has none
    return CommandTimes(min(starts, default=None), max(ends) if over else None)


# Every rank asks for the same few files. The stamp changes when one of them is written again.
@functools.lru_cache(maxsize=_KEPT)
def _host_runs(run: Path, stamp: tuple[int, int] | None) -> dict[str, list[HostRun]]:
    by_host: dict[str, list[HostRun]] = {}
    for host_run in read_host_runs(run) if stamp is not None else ():
        by_host.setdefault(host_run.host, []).append(host_run)
    return by_host


@functools.lru_cache(maxsize=_KEPT)
def _run_times(file: Path, stamp: tuple[int, int] | None) -> CommandTimes:
    if stamp is None:
        return CommandTimes()
    return read_record(file, CommandTimes, Oddities(RUN), _MOST_BYTES) or CommandTimes()


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size


def _unix_ns(seconds: float | None) -> int | None:
    return round(seconds * 1e9) if seconds is not None and 0 < seconds < _LATEST_S else None
