"""The events of a parameter server in a run folder, read into columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.records.change_values import Consistency
from stepscope.records.folders import SERVER_FOLDER
from stepscope.records.parameter_server import (
    PullColumns,
    PushColumns,
    RequestColumns,
    TogetherEvents,
)
from stepscope.records.quality import Note
from stepscope.text.words import counted
from stepscope.trace.files import is_folder, list_folder, read_whole
from stepscope.trace.run_folder.run_state import server_file

_MOST = 10**14  # a larger number is no duration (a day), size or count of one event
_LONGEST_NS = 10**16  # months: an event further from the others has a wrong clock
_NOT_A_NUMBER = re.compile(rb":\s*(?:NaN|-?Infinity)\b")  # the loss of a training that diverged
_EVENTS = ("pull", "push", "applied", "served", "member", "restored")


class _LostUpdates(msgspec.Struct):
    first: int
    last: int


class _EventLine(msgspec.Struct):
    """All fields of all events that are read; which of them a line has, its event says."""

    event: str = ""
    worker: int = -1
    life: int = 0
    clock: int = -1
    at_unix_ns: int = -1
    blocked_ns: int = 0
    transfer_ns: int = 0
    size_bytes: int = 0
    gap: int | None = None
    waited_for: int | None = None
    compute_ns: int | None = None
    took_ns: int = 0
    refused_ns: int = 0
    resent: int = 0
    loss: float | None = None
    shard: int = -1
    queue: int = 0
    waited_ns: int = 0
    members: list[str] = []
    replica: bool = False
    change: str = ""
    lost: list[_LostUpdates] = []


class _Shard(msgspec.Struct):
    shard: int
    size_bytes: int


class _Facts(msgspec.Struct):
    mode: str
    bound: int | None = None
    shards: list[_Shard] = []
    optimizer: str = ""
    compression: str | None = None


def read_server_events(runs: Sequence[Path]) -> TogetherEvents | None:
    """One job's run folders, of all hosts; None if none has a server. Raises
    UnreadableInputError if the server's own description cannot be read."""
    described = [file for run in runs if (file := server_file(run)) is not None]
    if not described:
        return None
    facts = _read_facts(described[0])
    events: dict[str, list[_EventLine]] = {name: [] for name in _EVENTS}
    notes: list[Note] = []
    folders = [run / SERVER_FOLDER for run in runs if is_folder(run / SERVER_FOLDER)]
    for file in (one for folder in folders for one in list_folder(folder)):
        if file.suffix == ".jsonl":
            lines, note = _read_lines(file)
            notes += [note] if note else []
            for line in lines:
                if line.event in events:
                    events[line.event].append(line)
    notes += _drop_wrong_clocks(events)
    return TogetherEvents(
        consistency=_consistency(described[0], facts),
        shard_bytes={shard.shard: shard.size_bytes for shard in facts.shards},
        optimizer=facts.optimizer,
        compression=facts.compression,
        pulls=_pulls(events["pull"]),
        pushes=_pushes(events["push"]),
        applied=_requests(line for line in events["applied"] if not line.replica),
        served=_requests(events["served"]),
        evicted=tuple(line.worker for line in events["member"] if line.change == "evicted"),
        restored=tuple(line.shard for line in events["restored"]),
        lost_updates=sum(
            max(0, lost.last - lost.first + 1) for line in events["restored"] for lost in line.lost
        ),
        notes=tuple(notes),
    )


def _read_facts(file: Path) -> _Facts:
    try:
        return msgspec.json.decode(read_whole(file), type=_Facts)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableInputError(
            f"{file} does not describe a parameter server: {error}"
        ) from None


def _consistency(file: Path, facts: _Facts) -> Consistency:
    bounded = facts.mode in ("bounded", "weak") and facts.bound is not None
    try:
        return Consistency.parse(f"{facts.mode}:{facts.bound}" if bounded else facts.mode)
    except UsageError as error:
        raise UnreadableInputError(f"{file}: {error}") from None


def _read_lines(file: Path) -> tuple[list[_EventLine], Note | None]:
    """A killed process leaves its last line cut off; any bad line is left out and counted."""
    texts = read_whole(file).splitlines()
    decoder = msgspec.json.Decoder(_EventLine)
    lines, bad = [], 0
    for place, text in enumerate(texts):
        try:
            line = decoder.decode(_NOT_A_NUMBER.sub(b":null", text))
        except (msgspec.DecodeError, UnicodeDecodeError):
            bad += place < len(texts) - 1 and bool(text.strip())
            continue
        if _is_plausible(line):
            lines.append(line)
        else:
            bad += 1
    if not bad:
        return lines, None
    detail = f"{file}: {counted(bad, 'line')} of {len(texts)} left out: not what a server writes"
    return lines, Note(id="server-lines", detail=detail)


def _drop_wrong_clocks(events: dict[str, list[_EventLine]]) -> list[Note]:
    """Leave out events that lie months away from the others."""
    times = [line.at_unix_ns for lines in events.values() for line in lines]
    if not times:
        return []
    usual = sorted(times)[len(times) // 2]
    kept = 0
    for name, lines in events.items():
        events[name] = [line for line in lines if abs(line.at_unix_ns - usual) < _LONGEST_NS]
        kept += len(events[name])
    if kept == len(times):
        return []
    detail = f"{counted(len(times) - kept, 'event')} left out: months away from the others"
    return [Note(id="server-lines", detail=detail)]


def _is_plausible(line: _EventLine) -> bool:
    """Whether the event has its worker or shard, and no time, size or count is impossible."""
    who = line.shard if line.event in ("applied", "served", "restored") else line.worker
    if line.event in _EVENTS and (who < 0 or line.at_unix_ns < 0):
        return False
    positive = (
        *(line.blocked_ns, line.transfer_ns, line.size_bytes, line.took_ns, line.refused_ns),
        *(line.resent, line.queue, line.waited_ns, line.gap or 0, line.waited_for or 0),
        *(line.compute_ns or 0, line.life, line.clock + 1, who + 1),
    )
    return all(0 <= number < _MOST for number in positive) and line.at_unix_ns < 2**62


def _column(lines: Sequence[_EventLine], name: str) -> Any:
    values = (getattr(line, name) for line in lines)
    return np.array([-1 if value is None else value for value in values], np.int64)


def _pulls(lines: Iterable[_EventLine]) -> PullColumns:
    ordered = sorted(lines, key=_in_time)
    return PullColumns(**{name: _column(ordered, name) for name in PullColumns.__struct_fields__})


def _pushes(lines: Iterable[_EventLine]) -> PushColumns:
    ordered = sorted(lines, key=_in_time)
    names = [name for name in PushColumns.__struct_fields__ if name != "loss"]
    loss = np.array([np.nan if line.loss is None else line.loss for line in ordered], np.float64)
    return PushColumns(loss=loss, **{name: _column(ordered, name) for name in names})


def _requests(lines: Iterable[_EventLine]) -> RequestColumns:
    ordered = sorted(lines, key=_in_time)
    names = [name for name in RequestColumns.__struct_fields__ if name != "gradients"]
    gradients = np.array([len(line.members) for line in ordered], np.int64)
    return RequestColumns(gradients=gradients, **{name: _column(ordered, name) for name in names})


def _in_time(line: _EventLine) -> tuple[int, int, int]:
    return line.at_unix_ns, line.worker, line.clock
