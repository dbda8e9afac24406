"""Whether several run folders are parts of one job: its name, its times, its command line."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import UsageError
from stepscope.records.figures import duration
from stepscope.records.quality import Note
from stepscope.trace.command_times import CommandTimes
from stepscope.trace.decode import Oddities
from stepscope.trace.host_files import read_host_runs
from stepscope.trace.rank_facts import RANK, decode_facts
from stepscope.trace.run_state import RUN
from stepscope.trace.side_files import read_record

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_CLOCKS_APART_NS = 60_000_000_000  # hosts' clocks may differ by this much
_MOST_BYTES = 64 << 20
_INSTEAD = "explain each of them, or `stepscope compare` them"


class DifferentRunsError(UsageError):
    """The run folders are not parts of one job."""


class _RunPart(msgspec.Struct, frozen=True):
    """What a folder says about the job it belongs to."""

    folder: Path
    jobs: frozenset[str]  # names, with the port of the meeting where the name is not unique
    began_ns: int
    ended_ns: int
    argv: tuple[str, ...]  # of its first rank
    hosts: frozenset[str]  # of its first rank


def check_one_job(runs: Sequence[Path]) -> list[Note]:
    """DifferentRunsError if the folders surely belong to different jobs."""
    parts = [_read_part(run) for run in runs]
    named = [part for part in parts if part.jobs]
    for one, other in pairwise(named):
        if not one.jobs & other.jobs:
            raise DifferentRunsError(
                f"{one.folder} belongs to {min(one.jobs)} and {other.folder} to "
                f"{min(other.jobs)}: these are different jobs; {_INSTEAD}"
            )
    if len(named) < len(parts):
        _refuse_apart(parts)
        _refuse_other_commands(parts)
    return _about_commands(parts)


def _refuse_apart(parts: Sequence[_RunPart]) -> None:
    """Nothing but their times says whether they belong together."""
    first, *others = sorted(parts, key=lambda part: part.began_ns)
    ended_ns = first.ended_ns
    for part in others:
        gap_ns = part.began_ns - ended_ns
        if gap_ns > _CLOCKS_APART_NS:
            raise DifferentRunsError(
                f"{part.folder} began {duration(gap_ns)} after the run in {first.folder} had "
                f"ended: these are different runs; {_INSTEAD}"
            )
        ended_ns = max(ended_ns, part.ended_ns)


def _refuse_other_commands(parts: Sequence[_RunPart]) -> None:
    """Hosts may give their own arguments to one script; one host does not start a job twice."""
    for one, other in pairwise(part for part in parts if part.argv):
        script = one.argv[0] != other.argv[0]
        if script or (one.argv != other.argv and one.hosts & other.hosts):
            raise DifferentRunsError(
                f"{one.folder} ran {_command(one)} and {other.folder} ran {_command(other)}: these "
                f"are different runs; {_INSTEAD}"
            )


def _command(part: _RunPart) -> str:
    return " ".join(part.argv)[:200]


def _about_commands(parts: Sequence[_RunPart]) -> list[Note]:
    known = [part for part in parts if part.argv]
    different = [part for part in known if part.argv != known[0].argv]
    if not different:
        return []
    first, other = known[0], different[0]
    detail = (
        f"the parts ran different commands: {_command(first)} in {first.folder}, "
        f"{_command(other)} in {other.folder}"
    )
    return [Note(id="different-commands", detail=detail, count=len(different))]


def _read_part(run: Path) -> _RunPart:
    hosts = read_host_runs(run)
    whole = read_record(run / RUN, CommandTimes, Oddities(RUN), _MOST_BYTES) or CommandTimes()
    times = [CommandTimes(host.started_unix, host.ended_unix) for host in hosts] or [whole]
    began = [time.began_ns for time in times if time.began_ns is not None]
    ended = [time.ended_ns or 1 << 62 for time in times]  # it may still run
    jobs = {
        f"{host.job} at port {host.meeting.rpartition(':')[2]}" if host.meeting else host.job
        for host in hosts
        if host.job
    }
    return _RunPart(
        folder=run,
        jobs=frozenset(jobs),
        began_ns=min(began, default=0),
        ended_ns=max(ended),
        argv=_argv(run),
        hosts=_hosts(run),
    )


def _argv(run: Path) -> tuple[str, ...]:
    """Ranks that only say where their script is in another way run the same one."""
    for rank in sorted(run.glob("rank-*"))[:1]:
        argv = decode_facts(rank, Oddities(RANK)).argv
        if isinstance(argv, list) and argv:
            return (argv[0].rpartition("/")[2], *argv[1:])
    return ()


def _hosts(run: Path) -> frozenset[str]:
    """Of its first rank; a host that does not say its name is none."""
    ranks = sorted(run.glob("rank-*"))[:1]
    names = (decode_facts(rank, Oddities(RANK)).host for rank in ranks)
    return frozenset(name for name in names if isinstance(name, str) and name)
