"""Find when a rank's part of a command began and ended, and which attempt it is: run.json,
hosts/ and rank.json.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stepscope.records.folders import HOSTS, STEPS_FILE, ProcessIdentity
from stepscope.records.rank import StepColumns
from stepscope.records.run import HostRun, RunTimes
from stepscope.trace.decode import Oddities, read_record
from stepscope.trace.files import is_folder
from stepscope.trace.run_folder.rank_facts import CapturedEnd, CapturedStartUp, decode_facts
from stepscope.trace.run_folder.rank_folder import read_rounds
from stepscope.trace.run_folder.run_state import MAX_RUN_BYTES, RUN, read_host_runs
from stepscope.trace.run_folder.step_files import read_step_columns

if TYPE_CHECKING:
    from stepscope.trace.clock_offsets import ClockOffsets

# Times of different hosts are never compared as they are. In a job with a `stepscope run` on every
# host, a rank's times are those of the one on its own host. Where one of them started ranks on
# other hosts, the clock rounds of both hosts bring its times to the rank's clock.


def read_run_times(
    folder: Path, steps: StepColumns | None, same_rank: Sequence[Path] = ()
) -> RunTimes | None:
    """Return None where nobody wrote when the command began, as under `watch`.

    `same_rank` are this rank's folders, this one among them, in the order in which they began.
    Without them, only this run folder is searched.
    """
    facts = decode_facts(folder)
    start = facts.start_up if isinstance(facts.start_up, CapturedStartUp) else CapturedStartUp()
    host = facts.host if isinstance(facts.host, str) else None
    command = read_command_times(folder.parent, host, start.began_unix_ns)
    command, unknown = _on_clock_of(folder, host, command)
    last_ns = int(steps.end_unix_ns[-1]) if steps is not None and len(steps) else 0
    began_ns, ended_ns, notes = command.began_ns, command.ended_ns, list[str]()
    if began_ns is None:
        return None
    if ended_ns is None:
        ended_ns = last_ns or began_ns
        notes.append("the command's end was not recorded, so the wall time ends with the last step")
    neighbours = _neighbours(folder, same_rank)
    attempt, began_ns, ended_ns = _attempt(folder, neighbours, began_ns, ended_ns, last_ns)
    if unknown and steps is not None and not began_ns <= last_ns <= ended_ns:
        notes.append(f"{unknown}, so start-up and shut-down are not known")
    end = facts.after_last_step
    return RunTimes(
        began_ns=began_ns,
        ended_ns=ended_ns,
        attempt=attempt,
        imports_ns=max(0, start.torch_unix_ns - start.began_unix_ns)
        if start.began_unix_ns and start.torch_unix_ns
        else 0,
        group_ns=start.group_ns,
        first_batch_ns=start.first_batch_unix_ns,
        after_last_ns={
            "evaluation": end.evaluation_ns,
            "checkpoint": end.checkpoint_ns,
            "between_epochs": end.between_epochs_ns,
        }
        if isinstance(end, CapturedEnd)
        else {},
        notes=tuple(notes),
    )


def _on_clock_of(folder: Path, host: str | None, command: CommandTimes) -> tuple[CommandTimes, str]:
    """The command's times on the clock of the rank's host; a sentence if that is not possible."""
    there = command.host
    if host is None or there is None or host == there:
        return command, ""
    offsets = _offsets(folder, there)
    if offsets is None:
        return command, f"the clocks of {host} and of {there}, where the command ran, are unknown"
    first_s, last_s = (float(offsets.offset_ns[place]) / 1e9 for place in (0, -1))
    started, ended = command.started_unix, command.ended_unix
    return CommandTimes(started and started + first_s, ended and ended + last_s), ""


def _offsets(folder: Path, there: str) -> ClockOffsets | None:
    """This rank's clock against that of the command's host, if rank 0 is there."""
    first = folder.with_name("rank-00000")
    if folder == first or decode_facts(first).host != there:
        return None
    from stepscope.trace.clock_offsets import compare_rounds

    return compare_rounds(read_rounds(folder), read_rounds(first))


class _Neighbours(NamedTuple):
    """The processes that had the same rank before and after this one."""

    place: int  # of this one, from 1
    before: Path | None
    after: Path


def _neighbours(folder: Path, same_rank: Sequence[Path]) -> _Neighbours:
    """A job that is restarted writes rank-00000, then rank-00000.2."""
    if folder in same_rank:
        place = same_rank.index(folder)
        before = same_rank[place - 1] if place else None
        return _Neighbours(place + 1, before, [*same_rank, folder / "none"][place + 1])
    name, _, number = folder.name.partition(".")
    place = int(number) if number.isdecimal() else 1
    before = folder.with_name(f"{name}.{place - 1}" if place > 2 else name) if place > 1 else None
    return _Neighbours(place, before, folder.with_name(f"{name}.{place + 1}"))


def _attempt(
    folder: Path, neighbours: _Neighbours, began_ns: int, ended_ns: int, last_ns: int
) -> tuple[int, int, int]:
    """This process's attempt at the job: its number, and when it began and ended. Processes that
    ran at the same time are no attempts."""
    place, before, after = neighbours
    own, following = began_unix_ns(folder), began_unix_ns(after)
    if following is not None and last_ns <= following <= ended_ns:
        ended_ns = following
    if own is not None and own >= began_ns:
        attempt = attempt_by_time(folder, own, last_end_unix_ns, place)
        if attempt is not None:
            return attempt, own if attempt > 1 else began_ns, ended_ns
    before_ns = last_end_unix_ns(before) if before is not None else 0
    if before is None or own is None or own < began_ns or own < before_ns:
        return 1, began_ns, ended_ns
    # A command of its own started this attempt, unless the one before did.
    return place, began_ns if began_ns > before_ns else own, ended_ns


def last_end_unix_ns(folder: Path) -> int:
    """When the last step that is written there ended; 0 if none is."""
    steps = read_step_columns(folder, Oddities(STEPS_FILE))
    return int(steps.end_unix_ns[-1]) if steps is not None and len(steps) else 0


def began_unix_ns(folder: Path) -> int | None:
    """When the process of a rank's folder loaded stepscope; None if it did not say."""
    if not is_folder(folder):
        return None
    start = decode_facts(folder).start_up
    return start.began_unix_ns if isinstance(start, CapturedStartUp) else None


# When the command of a rank began and ended: its host's file in hosts/, else run.json.
#
# Each host writes the times of its own clock. A run without files of hosts has one command.

_LATEST_S = 1e10
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
    """Read the times of the command that started this process on this host."""
    by_host = _host_runs(run, stamp_of(run / HOSTS))
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
        # Of the last attempt among them: the first start and the last end of its commands.
        runs = started or own
        last = max(run.attempt for run in runs)
        current = [run for run in runs if run.attempt == last]
        starts = [run.started_unix for run in current if run.started_unix is not None]
        ends = [run.ended_unix for run in current if run.ended_unix is not None]
        over = len(ends) == len(current)  # no end while one of the commands has none
        times = CommandTimes(min(starts, default=None), max(ends) if over else None)
        process = (started or own)[0].process if elsewhere and len(by_host) == 1 else None
        return msgspec.structs.replace(times, process=process)
    return _run_times(run / RUN, stamp_of(run / RUN))


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
    return read_record(file, CommandTimes, max_bytes=MAX_RUN_BYTES) or CommandTimes()


def stamp_of(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size


def _unix_ns(seconds: float | None) -> int | None:
    return round(seconds * 1e9) if seconds is not None and 0 < seconds < _LATEST_S else None


# The attempt of a rank that took part in some attempts only, because the job grew or shrank.
#
# Its folders are numbered from its own first process; rank 0 takes part in every attempt.

_FIRST_RANK = "rank-00000"


def attempt_by_time(
    folder: Path, began_ns: int, last_end_ns: Callable[[Path], int], place: int
) -> int | None:
    """One more than the attempts of rank 0 that had ended when this process began.

    None for a rank with as many processes as rank 0: the `place` of this one among them decides.
    """
    name = folder.name.partition(".")[0]
    if name == _FIRST_RANK or not is_folder(_numbered(folder, _FIRST_RANK, place + 1)):
        return None
    if _count(folder, name) >= _count(folder, _FIRST_RANK):
        return None
    attempt = 1
    while began_ns >= last_end_ns(_numbered(folder, _FIRST_RANK, attempt)):
        if not is_folder(_numbered(folder, _FIRST_RANK, attempt + 1)):
            break
        attempt += 1
    return attempt


def _count(folder: Path, name: str) -> int:
    number = 1
    while is_folder(_numbered(folder, name, number + 1)):
        number += 1
    return number


def _numbered(folder: Path, name: str, number: int) -> Path:
    return folder.with_name(name if number == 1 else f"{name}.{number}")
