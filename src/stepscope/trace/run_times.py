"""When a rank's part of a command began and ended: run.json and rank.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepscope.records.packed_steps import TAIL
from stepscope.records.run_times import RunTimes
from stepscope.trace.decode import Oddities
from stepscope.trace.rank_facts import CapturedEnd, CapturedStartUp, decode_facts
from stepscope.trace.regular_files import is_folder
from stepscope.trace.run_state import RUN
from stepscope.trace.side_files import read_record
from stepscope.trace.step_files import read_step_columns

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.step_columns import StepColumns

_LATEST_S = 1e10
_FIRST_RANK = "rank-00000"


class _Command(msgspec.Struct, frozen=True):
    started_unix: float | None = None
    ended_unix: float | None = None


def read_run_times(folder: Path, steps: StepColumns | None) -> RunTimes | None:
    """None where nobody wrote when the command began, as under `watch`."""
    command = read_record(folder.parent / RUN, _Command, Oddities(RUN)) or _Command()
    last_ns = int(steps.end_unix_ns[-1]) if steps is not None and len(steps) else 0
    began_ns, notes = _unix_ns(command.started_unix), []
    if began_ns is None:
        return None
    ended_ns = _unix_ns(command.ended_unix)
    if ended_ns is None:
        ended_ns = last_ns or began_ns
        notes.append("nobody wrote when the command ended: the account ends with the last step")
    attempt, began_ns, ended_ns = _attempt(folder, began_ns, ended_ns, last_ns)
    facts = decode_facts(folder, Oddities("rank.json"))
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
    own, following = _began_ns(folder), _began_ns(_numbered(folder, name, place + 1))
    if following is not None and last_ns <= following <= ended_ns:
        ended_ns = following
    if own is not None and own >= began_ns and _count(folder, name) < _count(folder, _FIRST_RANK):
        attempt = _attempt_by_time(folder, own)
        return attempt, own if attempt > 1 else began_ns, ended_ns
    before = _numbered(folder, name, max(1, place - 1))
    if place == 1 or own is None or own < began_ns or own < _last_end_ns(before):
        return 1, began_ns, ended_ns
    return place, own, ended_ns


def _attempt_by_time(folder: Path, own_ns: int) -> int:
    """Of a rank that took part in some attempts only, because the job grew or shrank: one more than
    the attempts of rank 0 that had ended when this process began."""
    attempt = 1
    while own_ns >= _last_end_ns(_numbered(folder, _FIRST_RANK, attempt)):
        if not is_folder(_numbered(folder, _FIRST_RANK, attempt + 1)):
            break
        attempt += 1
    return attempt


def _count(folder: Path, name: str) -> int:
    """How many processes wrote as this rank."""
    number = 1
    while is_folder(_numbered(folder, name, number + 1)):
        number += 1
    return number


def _numbered(folder: Path, name: str, number: int) -> Path:
    return folder.with_name(name if number == 1 else f"{name}.{number}")


def _last_end_ns(folder: Path) -> int:
    """When the last step that is written there ended; 0 if none is."""
    steps = read_step_columns(folder, Oddities(TAIL))
    return int(steps.end_unix_ns[-1]) if steps is not None and len(steps) else 0


def _began_ns(folder: Path) -> int | None:
    if not is_folder(folder):
        return None
    start = decode_facts(folder, Oddities("rank.json")).start_up
    return start.began_unix_ns if isinstance(start, CapturedStartUp) else None
