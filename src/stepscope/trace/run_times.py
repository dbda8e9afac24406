"""When a rank's part of a command began and ended: run.json, hosts/ and rank.json.

Times of different hosts are never compared as they are. In a job with a `stepscope run` on every
host, a rank's times are those of the one on its own host. Where one of them started ranks on other
hosts, the clock rounds of both hosts bring its times to the rank's clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stepscope.records.packed_steps import TAIL
from stepscope.records.run_times import RunTimes
from stepscope.trace.clock_offsets import compare_rounds
from stepscope.trace.command_times import CommandTimes, read_command_times
from stepscope.trace.decode import Oddities
from stepscope.trace.joined_later import attempt_by_time
from stepscope.trace.rank_facts import CapturedEnd, CapturedStartUp, decode_facts
from stepscope.trace.rank_folder import read_rounds
from stepscope.trace.regular_files import is_folder
from stepscope.trace.step_files import read_step_columns

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.records.step_columns import StepColumns
    from stepscope.trace.clock_offsets import ClockOffsets


def read_run_times(
    folder: Path, steps: StepColumns | None, same_rank: Sequence[Path] = ()
) -> RunTimes | None:
    """None where nobody wrote when the command began, as under `watch`.

    `same_rank` are this rank's folders, this one among them, in the order in which they began.
    Without them, only this run folder is searched.
    """
    facts = decode_facts(folder, Oddities("rank.json"))
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
        imports_ns=_between(start.began_unix_ns, start.torch_unix_ns),
        group_ns=start.group_ns,
        first_batch_ns=start.first_batch_unix_ns,
        after_last_ns=_after_last(end) if isinstance(end, CapturedEnd) else {},
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
    if folder == first or decode_facts(first, Oddities("rank.json")).host != there:
        return None
    return compare_rounds(read_rounds(folder), read_rounds(first))


def _between(first: int | None, second: int | None) -> int:
    return max(0, second - first) if first and second else 0


def _after_last(end: CapturedEnd) -> dict[str, int]:
    return {
        "evaluation": end.evaluation_ns,
        "checkpoint": end.checkpoint_ns,
        "between_epochs": end.between_epochs_ns,
    }


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
    steps = read_step_columns(folder, Oddities(TAIL))
    return int(steps.end_unix_ns[-1]) if steps is not None and len(steps) else 0


def began_unix_ns(folder: Path) -> int | None:
    """When the process of a rank's folder loaded stepscope; None if it did not say."""
    if not is_folder(folder):
        return None
    start = decode_facts(folder, Oddities("rank.json")).start_up
    return start.began_unix_ns if isinstance(start, CapturedStartUp) else None
