"""The files of a job's `stepscope run`s: one per host, or one per task of srun and mpirun."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stepscope.errors import StepscopeError
from stepscope.records.host_names import HOSTS
from stepscope.records.host_run import HostRun
from stepscope.trace.decode import NotJsonError, decode
from stepscope.trace.regular_files import read_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_MOST_BYTES = 1 << 20
_FILE = re.compile(r"[^.].*\.json")


def read_host_runs(folder: Path) -> list[HostRun]:
    """By attempt and place, without files that cannot be read. Empty for a run that was alone."""
    try:
        files = sorted(file for file in (folder / HOSTS).iterdir() if _FILE.fullmatch(file.name))
    except OSError:
        return []
    runs = [run for file in files if (run := read_host_run(file)) is not None]
    return sorted(runs, key=lambda run: run.attempt)


def read_host_run(file: Path) -> HostRun | None:
    try:
        return decode(read_whole(file, _MOST_BYTES), HostRun)
    except (StepscopeError, NotJsonError):
        return None


def last_attempt(runs: Iterable[HostRun]) -> list[HostRun]:
    """Without those of earlier attempts at the same job."""
    runs = list(runs)
    last = max((run.attempt for run in runs), default=0)
    return [run for run in runs if run.attempt == last]


def absent_places(runs: Sequence[HostRun]) -> list[int]:
    """Places of the job that left nothing, where it is known how many there are."""
    current = last_attempt(runs)
    expected = max((run.places or 0 for run in current), default=0)
    came = {run.place for run in current}
    if None in came:
        return list(range(len(current), expected))
    return [place for place in range(expected) if place not in came]
