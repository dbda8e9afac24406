"""Follow a run folder while the job writes it: its processes, and each rank's steps so far,
in bounded memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.errors import StepscopeError, UnreadableInputError, UsageError
from stepscope.records.folders import STEPS_FILE, ProcessIdentity, State, part_number, process_state
from stepscope.records.rank import ALL_PHASES, StepColumns
from stepscope.records.run import RunTimes
from stepscope.trace.decode import DECODE_ERRORS, read_record
from stepscope.trace.files import MAX_LINE_BYTES, MissingFileError, is_folder, list_folder, reading
from stepscope.trace.run_folder.rank_facts import RANK, folder_rank
from stepscope.trace.run_folder.run_state import RUN, is_run_folder
from stepscope.trace.run_folder.run_times import read_run_times, stamp_of
from stepscope.trace.run_folder.step_files import read_part
from stepscope.trace.run_folder.step_lines import (
    STEP_LINE_FIELDS,
    StepLine,
    step_rows,
    with_unnoted,
)

Ints = NDArray[np.int64]

# Follow a rank's steps while the job writes them: each line is read once, and memory is bounded.
#
# steps.jsonl is the tail of the run. Full blocks of it move to packed parts, and the file begins
# anew; a part is there before the tail is cut. So a tail that was read between two equal lists of
# parts holds every step that no part has.
#
# Up to a limit all steps are kept; beyond it, those whose number has a hash in a range that halves.
# A regular choice would see all or none of the stalls that come every fourth step.

MOST_KEPT = 50_000
RECENT = 1_000
_PIECE_BYTES = 4 << 20
_ROUNDS = 3  # of reading while blocks are packed


_MAY_BE_UNKNOWN = ("device_ns", "allocated_bytes")  # -1 where they are
_FIELDS = {name: place for place, name in enumerate(STEP_LINE_FIELDS)}


class StepsSoFar(msgspec.Struct, frozen=True, kw_only=True):
    """The last steps, and a sample of all; most looks need only the former."""

    kept_rows: Ints
    recent: StepColumns
    seen: int  # steps
    plain: int  # of them
    windows: int  # runs of profiled steps
    wall_ns: int  # of all steps
    whole: int  # steps whose beginning and end were seen
    whole_ns: int  # what they took
    unread: int = 0  # lines that make no sense

    @property
    def kept(self) -> StepColumns:
        """All steps, or of a long run a sample."""
        return _columns(self.kept_rows)


class StepFollower:
    """The steps of one rank's folder."""

    def __init__(self, folder: Path, most_kept: int = MOST_KEPT) -> None:
        self._folder = folder
        self._most = max(most_kept, 2)
        self._parts: frozenset[str] = frozenset()
        self._inode, self._offset = 0, 0
        self._decoder = msgspec.json.Decoder(StepLine)
        self._recent = self._rows = np.empty((len(_FIELDS), 0), np.int64)
        self._kept = 0  # columns of `_rows` in use
        self._halvings = 0
        self._last = -1
        self._in_window = False
        self._seen = self._plain = self._windows = self._wall_ns = self._unread = 0
        self._whole = self._whole_ns = 0

    def read(self) -> StepsSoFar:
        """Take in what was written since the last time."""
        for _ in range(_ROUNDS):
            new = sorted(self._list_parts() - self._parts)
            for name in new:
                try:
                    self._take(_fill_in(read_part(self._folder / name)))
                except UnreadableInputError:
                    self._unread += 1
            if new:
                self._parts |= set(new)
                self._offset = 0  # steps that are in the part as well do not count twice
            self._read_tail()
            if self._list_parts() <= self._parts:
                break
        return StepsSoFar(
            kept_rows=self._rows[:, : self._kept],
            recent=_columns(self._recent),
            seen=self._seen,
            plain=self._plain,
            windows=self._windows,
            wall_ns=self._wall_ns,
            whole=self._whole,
            whole_ns=self._whole_ns,
            unread=self._unread,
        )

    def _list_parts(self) -> frozenset[str]:
        try:
            names = [path.name for path in list_folder(self._folder)]
        except UnreadableInputError:  # it was removed
            return self._parts
        return frozenset(name for name in names if part_number(name) is not None)

    def _read_tail(self) -> None:
        try:
            with reading(self._folder / STEPS_FILE) as file:
                state = os.fstat(file.fileno())
                if state.st_ino != self._inode or state.st_size < self._offset:
                    self._inode, self._offset = state.st_ino, 0
                while left := state.st_size - self._offset:  # some files of a system never end
                    file.seek(self._offset)
                    piece = file.read(min(_PIECE_BYTES, left))
                    end = piece.rfind(b"\n") + 1
                    if not end and len(piece) <= MAX_LINE_BYTES:
                        return  # its writer has not finished the line
                    end = end or len(piece)
                    self._offset += end
                    self._take_lines(piece[:end])
        except MissingFileError:
            return
        except UnreadableInputError:
            self._unread += 1

    def _take_lines(self, text: bytes) -> None:
        rows = []
        for line in text.split(b"\n"):
            if line.strip():
                try:
                    rows.append(self._decoder.decode(line))
                except DECODE_ERRORS:
                    self._unread += 1
        if rows:
            self._take(_fill_in(dict(zip(STEP_LINE_FIELDS, step_rows(rows), strict=True))))

    def _take(self, rows: Ints) -> None:
        """Steps that follow those taken before; of two with one number the first counts."""
        highest = np.maximum.accumulate(np.concatenate(([self._last], rows[0])))
        rows = rows[:, rows[0] > highest[:-1]]
        if not rows.shape[1]:
            return
        # Phases that are longer than their step count as not captured.
        places = np.array([_FIELDS[f"{phase}_ns"] for phase in ALL_PHASES])
        long = np.flatnonzero(rows[places].sum(axis=0) > rows[_FIELDS["wall_ns"]])
        rows[np.ix_(places, long)] = 0
        window = rows[_FIELDS["window"]] != 0
        before = np.concatenate(([self._in_window], window[:-1]))
        self._windows += int((window & ~before).sum())
        self._in_window = bool(window[-1])
        self._last = int(rows[0, -1])
        self._seen += rows.shape[1]
        columns = _columns(rows)
        self._plain += int(columns.plain.sum())
        self._wall_ns += int(columns.wall_ns.sum())
        self._whole += int(columns.whole.sum())
        self._whole_ns += int(columns.wall_ns[columns.whole].sum())
        self._recent = np.concatenate((self._recent, rows), axis=1)[:, -RECENT:]
        self._keep(rows)

    def _keep(self, rows: Ints) -> None:
        """Keep new steps. What was handed out before never changes: new steps follow it, or the
        array is new."""
        rows = rows[:, _chosen(rows[0], self._halvings)]
        count = self._kept + rows.shape[1]
        if count > self._rows.shape[1]:
            larger = np.empty((len(_FIELDS), 2 * count), np.int64)
            larger[:, : self._kept] = self._rows[:, : self._kept]
            self._rows = larger
        self._rows[:, self._kept : count] = rows
        self._kept = count
        while self._kept > self._most:
            self._halvings += 1
            chosen = _chosen(self._rows[0, : self._kept], self._halvings)
            self._rows = self._rows[:, : self._kept][:, chosen]
            self._kept = self._rows.shape[1]


def _chosen(numbers: Ints, halvings: int) -> NDArray[np.bool_]:
    """One step in 2 ** halvings, spread evenly and without a period."""
    mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    chosen: NDArray[np.bool_] = (mixed >> np.uint64(32)) % np.uint64(1 << halvings) == 0
    return chosen


def _columns(rows: Ints) -> StepColumns:
    """Columns that hold nothing but their defaults were not captured."""

    def optional(name: str, absent: int = 0) -> Ints | None:
        column = rows[_FIELDS[name]]
        return column if (column != absent).any() else None

    phases = {phase: optional(f"{phase}_ns") for phase in ALL_PHASES}
    steps = StepColumns(
        number=rows[_FIELDS["step"]],
        wall_ns=rows[_FIELDS["wall_ns"]],
        end_unix_ns=rows[_FIELDS["end_unix_ns"]],
        phases_ns={phase: column for phase, column in phases.items() if column is not None},
        window=rows[_FIELDS["window"]] != 0,
        memory=(rows[_FIELDS["memory"]] | rows[_FIELDS["host"]]) != 0,
        whole=(rows[_FIELDS["first"]] | rows[_FIELDS["last"]]) == 0,
        epoch_gap_ns=optional("epoch_gap_ns"),
        device_ns=optional("device_ns", -1),
        elements=optional("elements"),
        allocated_bytes=optional("allocated_bytes", -1),
        cpu_wait_ns=optional("cpu_wait_ns"),
        major_faults=optional("major_faults"),
        retries=optional("retries"),
        graphs=optional("graphs"),
    )
    return with_unnoted(steps, rows[_FIELDS["unnoted_ns"]])


def _fill_in(columns: dict[str, Ints]) -> Ints:
    """Columns as an array of steps. What a line lacks was zero, or stays unknown."""
    rows = np.zeros((len(_FIELDS), len(columns["step"])), np.int64)
    for name, place in _FIELDS.items():
        least = -1 if name in _MAY_BE_UNKNOWN else 0
        column = columns.get(name)
        rows[place] = least if column is None else np.maximum(column, least)
    return rows


# Follow a run folder while the job writes it: which processes there are, and their steps so far.
#
# Everything may be missing: the folder is made first, the files follow one by one.

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


def choose_run(named: str | None, verb: str = "top") -> Path:
    """The folder that the user named, or the newest one under stepscope-runs."""
    if named is None:
        # By the time in its name, or for a run that is named by its job, by that of run.json.
        home = Path(HOME)
        with contextlib.suppress(StepscopeError):
            runs = [path for path in list_folder(home) if path.is_dir()]
            if runs:
                return max(runs, key=lambda run: (_last_known_s(run), run.name))
        raise UsageError(
            f"this folder has no run under {home}",
            f"name a run folder: stepscope {verb} RUN",
        )
    if "://" in named:
        raise UsageError(f"{named}: {verb} reads a run folder on this machine, not a URL")
    folder = Path(named)
    if not is_folder(folder):
        missing = f"{named} does not exist"
        raise UnreadableInputError(
            f"{named} is a file" if folder.exists() else missing, f"{verb} {_EXPECTED}"
        )
    if not is_run_folder(folder) and list_folder(folder):
        raise UnreadableInputError(
            f"{named} is not a run folder: it has neither {RUN} nor a folder of a rank"
        )
    return folder


_EXPECTED = "takes the run folder that `stepscope run` writes, such as stepscope-runs/..."


def _last_known_s(run: Path) -> float:
    with contextlib.suppress(ValueError, OverflowError):
        return time.mktime(time.strptime(run.name[:15], "%Y%m%d-%H%M%S"))
    stamp = stamp_of(run / RUN)
    return stamp[0] / 1e9 if stamp else 0.0


class RunFollower:
    """Reads what has been added to a run folder since the last time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: dict[str, _RankFollower] = {}

    def read(self) -> FollowedRun:
        """Raises UnreadableInputError when the folder is gone."""
        folders = [path for path in list_folder(self._folder) if folder_rank(path) is not None]
        run = read_record(self._folder / RUN, RunSoFar)
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
        stamp = (folders, *(stamp_of(path) for path in (self._folder / RANK, self._run_file)))
        if stamp != self._stamp:
            self._stamp = stamp
            self._facts = read_record(self._folder / RANK, RankSoFar) or RankSoFar()
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


def _state(facts: RankSoFar) -> str:
    if facts.status and facts.status != "running":
        return "ended"
    return process_state(facts.process) if facts.process else "unknown"
