"""Follow a run folder while the job writes it: which processes there are, and their steps so far.

Everything may be missing: the folder is made first, the files follow one by one.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import StepscopeError, UnreadableInputError, UsageError
from stepscope.records.process_identity import ProcessIdentity, State, process_state
from stepscope.trace.decode import Oddities
from stepscope.trace.follow_steps import MOST_KEPT, StepFollower, StepsSoFar
from stepscope.trace.rank_facts import RANK, folder_rank
from stepscope.trace.regular_files import is_folder, list_folder
from stepscope.trace.run_state import RUN, is_run_folder
from stepscope.trace.run_times import read_run_times
from stepscope.trace.side_files import read_record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepscope.records.run_times import RunTimes

HOME = "stepscope-runs"
_KEPT_IN_ALL = 16 * MOST_KEPT  # steps, over all ranks
_FEWEST_KEPT = 500
_ATTEMPT = re.compile(r"rank-\d{1,8}\.(\d{1,4})")


class RunSoFar(msgspec.Struct, frozen=True):
    """run.json."""

    status: str = ""
    command: list[str] = []
    started_unix: float | None = None
    ended_unix: float | None = None
    exit_code: int | None = None
    process: ProcessIdentity | None = None
    world_size: int | None = None


class RankSoFar(msgspec.Struct, frozen=True):
    """rank.json."""

    rank: int | None = None
    world_size: int | None = None
    status: str = ""
    process: ProcessIdentity | None = None


class FollowedRank(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the job. `state` is that of its process; "ended" once it closed its files."""

    rank: int
    attempt: int
    facts: RankSoFar
    state: str
    steps: StepsSoFar
    times: RunTimes | None  # of a run that goes on, without its end
    folder_name: str = ""


class FollowedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run folder at one moment. `state` is that of the process `stepscope run`."""

    folder: Path
    run: RunSoFar | None  # None: not written yet, or the script captures itself
    state: State | None
    ranks: tuple[FollowedRank, ...]


def choose_run(named: str | None) -> Path:
    """The folder that the user named, or the newest one under stepscope-runs."""
    if named is None:
        return _newest_run(Path(HOME))
    if "://" in named:
        raise UsageError(f"{named}: top follows a run folder on this machine, not a URL")
    folder = Path(named)
    if not is_folder(folder):
        missing = f"{named} does not exist"
        raise UnreadableInputError(f"{named} is a file" if folder.exists() else missing, _EXPECTED)
    if not is_run_folder(folder) and list_folder(folder):
        raise UnreadableInputError(
            f"{named} is not a run folder: it has neither {RUN} nor a folder of a rank"
        )
    return folder


_EXPECTED = "top takes the run folder that `stepscope run` writes, such as stepscope-runs/..."


def _newest_run(home: Path) -> Path:
    """By the time in its name, or for a run that is named by its job, by that of run.json."""
    with contextlib.suppress(StepscopeError):
        runs = [path for path in list_folder(home) if path.is_dir()]
        if runs:
            return max(runs, key=lambda run: (_last_known_s(run), run.name))
    raise UsageError(
        f"this folder has no run under {home}",
        "name a run folder: stepscope top RUN",
    )


def _last_known_s(run: Path) -> float:
    with contextlib.suppress(ValueError, OverflowError):
        return time.mktime(time.strptime(run.name[:15], "%Y%m%d-%H%M%S"))
    stamp = _stamp(run / RUN)
    return stamp[0] / 1e9 if stamp else 0.0


class RunFollower:
    """Reads what has been added to a run folder since the last time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: dict[str, _RankFollower] = {}

    def read(self) -> FollowedRun:
        """Raises UnreadableInputError when the folder is gone."""
        folders = [path for path in list_folder(self._folder) if folder_rank(path) is not None]
        run = read_record(self._folder / RUN, RunSoFar, Oddities(RUN))
        self._follow(folders)
        return FollowedRun(
            folder=self._folder,
            run=run,
            state=process_state(run.process) if run is not None and run.process else None,
            ranks=tuple(self._ranks[path.name].read(len(folders)) for path in folders),
        )

    def _follow(self, folders: Iterable[Path]) -> None:
        """Many ranks keep fewer steps each."""
        new = [path for path in folders if path.name not in self._ranks]
        share = _KEPT_IN_ALL // max(1, len(self._ranks) + len(new))
        most = min(MOST_KEPT, max(_FEWEST_KEPT, share))
        for path in new:
            self._ranks[path.name] = _RankFollower(path, most)


class _RankFollower:
    """One rank's folder. Its small files are read again only when one of them has changed."""

    def __init__(self, folder: Path, most_kept: int) -> None:
        self._folder = folder
        self._steps = StepFollower(folder, most_kept)
        self._stamp: tuple[object, ...] = ()
        self._facts = RankSoFar()
        self._times: RunTimes | None = None

    def read(self, folders: int) -> FollowedRank:
        """`folders` of ranks there are by now: a new one may be the next attempt of this rank."""
        steps = self._steps.read()
        stamp = (folders, *(_stamp(path) for path in (self._folder / RANK, self._run_file)))
        if stamp != self._stamp:
            self._stamp = stamp
            self._facts = read_record(self._folder / RANK, RankSoFar, Oddities(RANK)) or RankSoFar()
            self._times = read_run_times(self._folder, steps.kept)
        attempt = _ATTEMPT.fullmatch(self._folder.name)
        return FollowedRank(
            rank=folder_rank(self._folder) or 0,
            attempt=int(attempt[1]) if attempt else 1,
            facts=self._facts,
            state=_state(self._facts),
            steps=steps,
            times=self._times,
            folder_name=self._folder.name,
        )

    @property
    def _run_file(self) -> Path:
        return self._folder.parent / RUN


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size


def _state(facts: RankSoFar) -> str:
    if facts.status and facts.status != "running":
        return "ended"
    return process_state(facts.process) if facts.process else "unknown"
