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


class _RunPart(msgspec.Struct, frozen=True):
    """What a folder says about the job it belongs to."""

    folder: Path
    jobs: frozenset[str]  # names, with the port of the meeting where the name is not unique
    began_ns: int
    ended_ns: int
    argv: tuple[str, ...]  # of its first rank


def check_one_job(runs: Sequence[Path]) -> list[Note]:
    """UsageError if the folders surely belong to different jobs."""
    parts = [_read_part(run) for run in runs]
    named = [part for part in parts if part.jobs]
    for one, other in pairwise(named):
        if not one.jobs & other.jobs:
            raise UsageError(
                f"{one.folder} is a part of {min(one.jobs)} and {other.folder} of "
                f"{min(other.jobs)}: these are different jobs; {_INSTEAD}"
            )
    if len(named) < len(parts):
        _refuse_apart(parts)
    return _about_commands(parts)


def _refuse_apart(parts: Sequence[_RunPart]) -> None:
    """Nothing but their times says whether they belong together."""
    first, *others = sorted(parts, key=lambda part: part.began_ns)
    ended_ns = first.ended_ns
    for part in others:
        gap_ns = part.began_ns - ended_ns
        if gap_ns > _CLOCKS_APART_NS:
            raise UsageError(
                f"{part.folder} began {duration(gap_ns)} after the run in {first.folder} had "
                f"ended: these are different runs; {_INSTEAD}"
            )
        ended_ns = max(ended_ns, part.ended_ns)


def _about_commands(parts: Sequence[_RunPart]) -> list[Note]:
    known = [part for part in parts if part.argv]
    different = [part for part in known if part.argv != known[0].argv]
    if not different:
        return []
    first, other = known[0], different[0]
    detail = (
        f"the parts ran different commands: {' '.join(first.argv)[:200]} in {first.folder}, "
        f"{' '.join(other.argv)[:200]} in {other.folder}"
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
    )


def _argv(run: Path) -> tuple[str, ...]:
    """Ranks that only say where their script is in another way run the same one."""
    for rank in sorted(run.glob("rank-*"))[:1]:
        argv = decode_facts(rank, Oddities(RANK)).argv
        if isinstance(argv, list) and argv:
            return (argv[0].rpartition("/")[2], *argv[1:])
    return ()
