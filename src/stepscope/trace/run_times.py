"""When a rank's part of a command began and ended: run.json and rank.json.

Times of different hosts are never compared as they are. In a job with a `stepscope run` on every
host, a rank's times are those of the one on its own host. Where one of them started ranks on other
hosts, the clock rounds of both hosts bring its times to the rank's clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepscope.records.host_run import HostRun  # noqa: TC001  (decoded)
from stepscope.records.packed_steps import TAIL
from stepscope.records.process_identity import ProcessIdentity  # noqa: TC001  (decoded)
from stepscope.records.run_times import RunTimes
from stepscope.trace.clock_offsets import compare_rounds
from stepscope.trace.decode import Oddities
from stepscope.trace.rank_facts import CapturedEnd, CapturedStartUp, decode_facts
from stepscope.trace.rank_folder import read_rounds
from stepscope.trace.regular_files import is_folder
from stepscope.trace.run_state import RUN
from stepscope.trace.side_files import read_record
from stepscope.trace.step_files import read_step_columns

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.step_columns import StepColumns
    from stepscope.trace.clock_offsets import ClockOffsets

_LATEST_S = 1e10


class _Command(msgspec.Struct, frozen=True):
    started_unix: float | None = None
    ended_unix: float | None = None
    process: ProcessIdentity | None = None
    hosts: list[HostRun] = []  # every `stepscope run` of the job


def read_run_times(folder: Path, steps: StepColumns | None) -> RunTimes | None:
    """None where nobody wrote when the command began, as under `watch`."""
    facts = decode_facts(folder, Oddities("rank.json"))
    host = facts.host if isinstance(facts.host, str) else None
    command, unknown = _on_clock_of(folder, host)
    last_ns = int(steps.end_unix_ns[-1]) if steps is not None and len(steps) else 0
    began_ns, notes = _unix_ns(command.started_unix), list[str]()
    if began_ns is None:
        return None
    ended_ns = _unix_ns(command.ended_unix)
    if ended_ns is None:
        ended_ns = last_ns or began_ns
        notes.append("nobody wrote when the command ended: the account ends with the last step")
    attempt, began_ns, ended_ns = _attempt(folder, began_ns, ended_ns, last_ns)
    if unknown and steps is not None and not began_ns <= last_ns <= ended_ns:
        notes.append(f"{unknown}, so start-up and shut-down are not known")
    start = facts.start_up if isinstance(facts.start_up, CapturedStartUp) else CapturedStartUp()
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


def _on_clock_of(folder: Path, host: str | None) -> tuple[_Command, str]:
    """The command's times on the clock of the rank's host; a sentence if that is not possible."""
    command = read_record(folder.parent / RUN, _Command, Oddities(RUN)) or _Command()
    own = [run for run in command.hosts if run.host == host]
    if host is not None and own:
        starts = [run.started_unix for run in own if run.started_unix is not None]
        ends = [run.ended_unix for run in own if run.ended_unix is not None]
        return _Command(min(starts, default=None), max(ends, default=None)), ""
    there = command.process.host if command.process else None
    if host is None or there is None or host == there:
        return command, ""
    offsets = _offsets(folder, there)
    if offsets is None:
        return command, f"the clocks of {host} and of {there}, where the command ran, are unknown"
    first_s, last_s = (float(offsets.offset_ns[place]) / 1e9 for place in (0, -1))
    started, ended = command.started_unix, command.ended_unix
    return _Command(started and started + first_s, ended and ended + last_s), ""


def _offsets(folder: Path, there: str) -> ClockOffsets | None:
    """This rank's clock against that of the command's host, if rank 0 is there."""
    first = folder.with_name("rank-00000")
    if folder == first or decode_facts(first, Oddities("rank.json")).host != there:
        return None
    return compare_rounds(read_rounds(folder), read_rounds(first))


def _unix_ns(seconds: float | None) -> int | None:
    return round(seconds * 1e9) if seconds is not None and 0 < seconds < _LATEST_S else None


def _between(first: int | None, second: int | None) -> int:
    return max(0, second - first) if first and second else 0


def _after_last(end: CapturedEnd) -> dict[str, int]:
    return {
        "evaluation": end.evaluation_ns,
        "checkpoint": end.checkpoint_ns,
        "between_epochs": end.between_epochs_ns,
    }


def _attempt(folder: Path, began_ns: int, ended_ns: int, last_ns: int) -> tuple[int, int, int]:
    """A job that is restarted writes rank-00000, then rank-00000.2: its number, and when it began
    and ended. Processes that ran at the same time are no attempts."""
    name, _, number = folder.name.partition(".")
    place = int(number) if number.isdecimal() else 1
    own, following = _began_ns(folder), _began_ns(folder.with_name(f"{name}.{place + 1}"))
    if following is not None and last_ns <= following <= ended_ns:
        ended_ns = following
    before = folder.with_name(f"{name}.{place - 1}" if place > 2 else name)
    if place == 1 or own is None or own < began_ns or own < _last_end_ns(before):
        return 1, began_ns, ended_ns
    return place, own, ended_ns


def _last_end_ns(folder: Path) -> int:
    """When the last step that is written there ended; 0 if none is."""
    steps = read_step_columns(folder, Oddities(TAIL))
    return int(steps.end_unix_ns[-1]) if steps is not None and len(steps) else 0


def _began_ns(folder: Path) -> int | None:
    if not is_folder(folder):
        return None
    start = decode_facts(folder, Oddities("rank.json")).start_up
    return start.began_unix_ns if isinstance(start, CapturedStartUp) else None
