"""What capture wrote beside a rank's trace: clock rounds, the job's layout, the flight recorder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from stepscope.records.host_load import HostLoad
from stepscope.records.job import RankFolder, Rounds

if TYPE_CHECKING:
    from pathlib import Path

_T = TypeVar("_T")
RANK, CLOCK, COMMS, MEMORY = "rank.json", "clock.json", "comms.jsonl", "memory.json"


class _Sync(msgspec.Struct, frozen=True):
    rounds: list[tuple[int, int]]
    label: str = ""
    step: int | None = None


class _Clock(msgspec.Struct, frozen=True):
    syncs: list[_Sync] = []


class _Rank(msgspec.Struct, frozen=True):
    host: str | None = None
    pid: int | None = None
    world_size: int | None = None
    steps: int = 0
    communication: dict[str, Any] | None = None
    host_load: dict[str, Any] | None = None


def read_rank_folder(trace: Path) -> RankFolder | None:
    """None for a bare trace. A part that is missing or cut short is left out."""
    folder = trace.parent
    if not any((folder / name).exists() for name in (RANK, CLOCK, COMMS)):
        return None
    problems: list[str] = []
    rank = _decode(folder / RANK, _Rank, problems) or _Rank()
    clock = _decode(folder / CLOCK, _Clock, problems) or _Clock()
    return RankFolder(
        host=rank.host,
        pid=rank.pid,
        world_size=rank.world_size,
        steps=rank.steps,
        rounds=tuple(_rounds(sync) for sync in clock.syncs if sync.rounds),
        layout=rank.communication or {},
        comms=tuple(_lines(folder / COMMS)),
        load=_load(rank.host_load, problems),
        problems=tuple(problems),
    )


def _load(told: dict[str, Any] | None, problems: list[str]) -> HostLoad | None:
    if not told:
        return None
    try:
        return msgspec.convert(told, HostLoad)
    except msgspec.ValidationError as error:
        problems.append(f"{RANK}: host_load could not be read: {error}")
        return None


def read_facts(folder: Path) -> dict[str, Any]:
    """rank.json of a rank's folder as it stands; empty where it was not captured."""
    return _decode(folder / RANK, dict[str, Any], []) or {}


def read_memory(folder: Path) -> dict[str, Any] | None:
    """memory.json of a rank's folder as it stands; None where it was not captured."""
    return _decode(folder / MEMORY, dict[str, Any], [])


def _decode(file: Path, kind: type[_T], problems: list[str]) -> _T | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        problems.append(f"{file.name} could not be read: {error}")
        return None


def _rounds(sync: _Sync) -> Rounds:
    marks = np.array(sync.rounds, np.int64).reshape(-1, 2)
    return Rounds(label=sync.label, step=sync.step, came_ns=marks[:, 0], left_ns=marks[:, 1])


def _lines(file: Path) -> list[dict[str, Any]]:
    """Line by line: a kill may have cut the last one short."""
    try:
        text = file.read_bytes()
    except OSError:
        return []
    out = []
    for line in text.splitlines():
        try:
            out.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.DecodeError:
            continue
    return out
