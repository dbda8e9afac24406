"""When the command began and ended on each host: hosts/00001-node1.json, one per `stepscope run`.

Each file has the times of its own host's clock. A folder without them has one command on one clock:
that of run.json.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec

from stepscope.trace.decode import Oddities
from stepscope.trace.run_state import RUN
from stepscope.trace.side_files import read_record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOSTS = "hosts"
_LATEST_S = 1e10
_MOST_BYTES = 64 << 20  # of run.json, which lists every rank
_KEPT = 16


class CommandTimes(msgspec.Struct, frozen=True):
    """Unix times in seconds; those that make no sense are None."""

    started_unix: float | None = None
    ended_unix: float | None = None

    @property
    def began_ns(self) -> int | None:
        return _unix_ns(self.started_unix)

    @property
    def ended_ns(self) -> int | None:
        return _unix_ns(self.ended_unix)


def read_command_times(run: Path, host: str | None) -> CommandTimes:
    """Of the commands on this host; of the whole run where the host has no file."""
    by_host = _hosts_times(run, _stamp(run / HOSTS))
    if host in by_host:
        return by_host[host]
    return _read_times(run / RUN, _stamp(run / RUN))


def host_of(file: Path) -> str | None:
    """node1 for 00001-node1.json; None for other files."""
    place, dash, host = file.stem.partition("-")
    return host if file.suffix == ".json" and dash and place.isdecimal() and host else None


def list_host_files(run: Path) -> Iterator[tuple[str, Path]]:
    """Every host with each of its files; a host with several `stepscope run`s comes again."""
    for file in sorted((run / HOSTS).glob("*.json")):
        host = host_of(file)
        if host is not None:
            yield host, file


# Every rank asks for the same few files. The stamp changes when one of them is written again.
@functools.lru_cache(maxsize=_KEPT)
def _hosts_times(run: Path, stamp: tuple[int, int] | None) -> dict[str, CommandTimes]:
    if stamp is None:
        return {}
    times: dict[str, CommandTimes] = {}
    for host, file in list_host_files(run):
        own = read_record(file, CommandTimes, Oddities(file.name))
        if own is not None and own.began_ns is not None:
            times[host] = _both(times[host], own) if host in times else own
    return times


@functools.lru_cache(maxsize=_KEPT)
def _read_times(file: Path, stamp: tuple[int, int] | None) -> CommandTimes:
    if stamp is None:
        return CommandTimes()
    return read_record(file, CommandTimes, Oddities(RUN), _MOST_BYTES) or CommandTimes()


def _both(one: CommandTimes, other: CommandTimes) -> CommandTimes:
    """The first start and the last end; no end while one of the commands has none."""
    ends = (one.ended_unix, other.ended_unix)
    return CommandTimes(
        started_unix=min(one.started_unix or 0.0, other.started_unix or 0.0),
        ended_unix=None if None in ends else max(end for end in ends if end is not None),
    )


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size


def _unix_ns(seconds: float | None) -> int | None:
    return round(seconds * 1e9) if seconds is not None and 0 < seconds < _LATEST_S else None
