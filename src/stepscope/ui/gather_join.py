"""One run.json for the parts that several hosts closed each for itself."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

from stepscope.errors import StepscopeError, UsageError
from stepscope.measure.folder import RUN
from stepscope.records.host_names import HOSTS
from stepscope.trace.decode import NotJsonError, decode
from stepscope.trace.host_files import read_host_runs
from stepscope.trace.regular_files import read_whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_MOST_BYTES = 64 << 20


def join_run_files(
    staged: Sequence[Path], targets: dict[tuple[int, str], str]
) -> dict[str, Any] | None:
    """That of the first host, with the ranks and the hosts of all; None if no part has one.

    `targets` are the names of ranks' folders: see gather_plan.
    """
    records = [(place, record) for place, run in enumerate(staged) if (record := _read(run / RUN))]
    if not records:
        return None
    first = min(records, key=lambda pair: (_first_place(staged[pair[0]]), pair[0]))[1]
    if len(staged) == 1:
        return first
    unfinished = [record for _, record in records if record.get("status") != "finished"]
    ends = [record.get("ended_unix") for _, record in records]
    starts = [start for _, record in records if (start := record.get("started_unix"))]
    whole = {**(unfinished[0] if unfinished else first)}
    whole["started_unix"] = min(starts, default=None)
    whole["ended_unix"] = None if None in ends else max(end for end in ends if end is not None)
    whole["ranks"] = [
        {**rank, "folder": targets[place, rank["folder"]]}
        for place, record in records
        for rank in record.get("ranks") or ()
        if (place, rank.get("folder")) in targets
    ]
    whole["hosts"] = _distinct(host for _, record in records for host in record.get("hosts") or ())
    worlds = [world for _, record in records if (world := record.get("world_size"))]
    whole["world_size"] = max(worlds, default=None)
    return whole


def host_file(staged: Path) -> tuple[str, dict[str, Any]] | None:
    """The file in hosts/ that a run which was alone in its folder lacks: its own times."""
    record = _read(staged / RUN)
    if record is None or read_host_runs(staged):
        return None
    process = record.get("process") or {}
    host = process.get("host") if isinstance(process, dict) else None
    if not host or "/" in host or record.get("started_unix") is None:
        return None
    names = ("stepscope", "status", "exit_code", "started_unix", "ended_unix", "process", "signals")
    known = {name: record[name] for name in names if name in record}
    return f"{HOSTS}/{host}.json", {**known, "host": host}


def refuse_other_hosts(staged: dict[str, Path]) -> None:
    """UsageError if two sources have the same place of the job, written by different processes."""
    seen: dict[str, tuple[str, Any]] = {}
    for source, run in staged.items():
        for file in sorted((run / HOSTS).glob("*.json")):
            process = (_read(file) or {}).get("process")
            other, known = seen.setdefault(file.name, (source, process))
            if known != process:
                raise UsageError(
                    f"{HOSTS}/{file.name} is in {other} and in {source}, and they differ: these "
                    "are not parts of one job"
                )


def _first_place(run: Path) -> int:
    places = [part.place for part in read_host_runs(run) if part.place is not None]
    return min(places, default=0)


def _distinct(values: Any) -> list[Any]:
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())


def _read(file: Path) -> dict[str, Any] | None:
    with contextlib.suppress(StepscopeError, NotJsonError):
        return decode(read_whole(file, _MOST_BYTES), dict[str, Any])
    return None
