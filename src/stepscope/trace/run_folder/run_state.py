"""Tell how the run in a folder was started, how it ended and why it failed: run.json, hosts/
and every rank.json.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from stepscope.errors import StepscopeError, UnreadableInputError
from stepscope.records.folders import (
    HOSTS,
    SERVER_FILE,
    SERVER_FOLDER,
    TRACE,
    ProcessIdentity,
    process_state,
    processes_files,
    unwritten_parts,
)
from stepscope.records.quality import Note
from stepscope.records.run import (
    AppliedRemedy,
    FailedCommand,
    HostRun,
    PassedSignal,
    RunOrigin,
    join_ranks,
)
from stepscope.records.source_lines import Place
from stepscope.text.words import counted, plural
from stepscope.trace.decode import NotJsonError, decode, read_record
from stepscope.trace.files import (
    SIDE_FILES,
    LineFile,
    MissingFileError,
    is_folder,
    may_exist,
    read_whole,
)
from stepscope.trace.remote import is_url
from stepscope.trace.run_folder.rank_facts import RANK, decode_facts, folder_rank

# How the run in a folder ended: closed, still running, or left open and by which process.
#
# `stepscope run` writes run.json, every rank writes rank.json. Both say "running" until they are
# closed, and name their process. Either may be missing, cut short or from another machine.

_T = TypeVar("_T")
RUN = "run.json"
MAX_RUN_BYTES = 64 << 20  # it lists every rank
_NAMED = 4  # ranks that a sentence names


class _TraceChoice(msgspec.Struct, frozen=True):
    chosen: bool = True


class _RankFile(msgspec.Struct, frozen=True):
    rank: int | None = None
    status: str = ""
    process: ProcessIdentity | None = None
    problems: list[str] = []
    folder: str = ""
    missing: dict[str, str] = {}
    trace: _TraceChoice = _TraceChoice()
    torch: str | None = None
    captured: list[str] = []  # in run.json
    start_up: Any = None  # checked where it is used

    def began_before(self, unix: float) -> bool:
        """Whether it is known that this process is older."""
        began = self.start_up.get("began_unix_ns") if isinstance(self.start_up, dict) else None
        return isinstance(began, int) and began < unix * 1e9


class _RunFile(msgspec.Struct, frozen=True):
    status: str = ""
    process: ProcessIdentity | None = None
    signals: list[PassedSignal] = []
    ranks: list[_RankFile] = []
    exit_code: int | None = None


def is_run_folder(folder: Path) -> bool:
    return (folder / RUN).exists() or any(True for _ in folder.glob("rank-*"))


def run_notes(*folders: Path, ranks: Sequence[Path] = ()) -> list[Note]:
    """Return what to know before trusting the run's numbers; empty for a complete run.

    A job may have several folders, one per host. `ranks` are the folders of its ranks, if known.
    """
    folders = tuple(folder for folder in folders if is_run_folder(folder))
    if not folders:
        return []
    files = ranks or [rank for folder in folders for rank in sorted(folder.glob("rank-*"))]
    captured = [_read_rank(file) for file in files]
    parts = [part for folder in folders for part in read_host_runs(folder)]
    run, problem = _join_runs(folders)
    current = _without_earlier_attempts(captured, parts)
    state = _open_parts(parts, current) if parts else _state_note(run, current)
    notes = [
        state or (_ended_ranks(run, current) if run else None),
        _missing_note(run, captured),
        _lost_note(run, files),
        _versions_note(captured, parts),
    ]
    if problem:
        notes.append(Note(id="not-closed", detail=f"the run was not closed: {problem}"))
    return [note for note in notes if note is not None]


def _without_earlier_attempts(
    ranks: Sequence[_RankFile], parts: Sequence[HostRun]
) -> list[_RankFile]:
    """Ranks that the last attempt of a requeued job started."""
    starts = [part.started_unix for part in last_attempt(parts) if part.started_unix is not None]
    if not starts or len({part.attempt for part in parts}) == 1:
        return list(ranks)
    return [rank for rank in ranks if not rank.began_before(min(starts))]


def _join_runs(folders: Sequence[Path]) -> tuple[_RunFile | None, str | None]:
    """The run.json of the first host, with the ranks of all; and a problem of one of them."""
    ordered = sorted(folders, key=_first_place)
    decoded = [_decode(folder / RUN, _RunFile) for folder in ordered]
    runs = [run for run, _ in decoded if run is not None]
    problem = next((problem for _, problem in decoded if problem), None)
    if not runs:
        return None, problem
    unfinished = [run for run in runs if run.status != "finished"]
    everyone = [rank for run in runs for rank in run.ranks]
    return replace((unfinished or runs)[0], ranks=everyone), problem


def _first_place(folder: Path) -> int:
    """Return the first place of the job's parts in this folder."""
    places = [part.place for part in read_host_runs(folder) if part.place is not None]
    return min(places, default=0)


def _read_rank(folder: Path) -> _RankFile:
    rank, problem = _decode(folder / RANK, _RankFile)
    if rank is None:
        rank = _RankFile(status="unreadable", problems=[problem or f"{RANK} was not written"])
    # A rank that was not chosen for a trace does not lack one.
    missing = unwritten_parts(rank.problems)
    if not rank.trace.chosen or any(folder.glob("trace*.json*")):
        missing.pop(TRACE, None)
    elif TRACE not in missing:
        missing[TRACE] = "; ".join(rank.problems)
    return replace(rank, folder=folder.name, missing=missing)


def _state_note(run: _RunFile | None, ranks: Sequence[_RankFile]) -> Note | None:
    """Whether the run was closed; without run.json, a script captured itself: see the ranks."""
    if run is None:
        states = _open_states(ranks)
        if not states:
            return None
        if set(states) == {"running"}:
            return Note(
                id="still-running",
                detail="its processes are still running, so more steps may follow",
            )
        return Note(id="not-closed", detail=f"the run was not closed{_rank_words(ranks)}")
    if run.status == "handed over":
        return Note(
            id="not-closed",
            detail="the run was not closed: stepscope could not start a second process, so the "
            f"command replaced it{_rank_words(ranks)}",
        )
    if run.status == "finished":
        return _ended_ranks(run, ranks)
    if run.process is None or run.status != "running":
        return None
    who = f"stepscope run (process {run.process.pid} on {run.process.host})"
    state = process_state(run.process)
    if state == "running":
        return Note(id="still-running", detail=f"{who} is still running, so more steps may follow")
    return Note(
        id="not-closed",
        detail=f"the run was not closed: {who} {_end_words(state, run)}{_rank_words(ranks)}",
    )


def _open_parts(parts: Sequence[HostRun], ranks: Sequence[_RankFile]) -> Note | None:
    """A job of several `stepscope run`s: the first of them that has not ended."""
    for part in last_attempt(parts):
        if part.is_finished or part.process is None:
            continue
        who = f"stepscope run on {part.host} (process {part.process.pid})"
        state = process_state(part.process)
        if state == "running":
            detail = f"{who} is still running, so more steps may follow"
            return Note(id="still-running", detail=detail)
        words = f"the run was not closed: {who} {_end_words(state, part)}{_rank_words(ranks)}"
        return Note(id="not-closed", detail=words)
    return None


def absent_hosts(folders: Sequence[Path]) -> Note | None:
    """Parts of the job that none of these folders holds."""
    parts = [part for folder in folders for part in read_host_runs(folder)]
    absent = absent_places(parts)
    if not absent:
        return None
    places = max(part.places or 0 for part in parts)
    named = ", ".join(map(str, absent[:_NAMED])) + (", ..." if len(absent) > _NAMED else "")
    return Note(
        id="missing-hosts",
        detail=f"{len(absent)} of {places} parts of the job ({named}) are not in this folder: they "
        "did not start, or they wrote elsewhere. `explain` accepts several folders",
        count=len(absent),
    )


def _end_words(state: str, run: _RunFile | HostRun) -> str:
    signals = ", ".join(dict.fromkeys(received.signal for received in run.signals[:_NAMED]))
    after = f", after it passed {signals} on to the command" if signals else ""
    if state == "restarted":
        return f"ended because the machine restarted{after}"
    if state == "gone":
        return f"was killed (SIGKILL, by a person or because memory ran out){after}"
    return f"did not finish; this machine cannot see whether it still runs{after}"


def _rank_words(ranks: Sequence[_RankFile]) -> str:
    """Return what is known about the job's own processes."""
    if not ranks:
        return "; no rank had finished a step"
    closed = sum(rank.status == "finished" for rank in ranks)
    states = _open_states(ranks)
    running, gone = states.count("running"), states.count("gone")
    parts = [
        f"{closed} of {counted(len(ranks), 'rank')} closed {plural(closed, 'its', 'their')} files"
        if closed
        else "",
        f"{counted(running, 'rank')} still {plural(running, 'runs', 'run')}" if running else "",
        f"{counted(gone, 'rank')} ended without closing" if gone else "",
    ]
    words = ", ".join(filter(None, parts))
    return f"; {words}" if words else ""


def _open_states(ranks: Sequence[_RankFile]) -> list[str]:
    """The states of processes whose files were not closed."""
    unclosed = (rank.process for rank in ranks if rank.status == "running")
    return [process_state(process) for process in unclosed if process is not None]


def _ended_ranks(run: _RunFile, ranks: Sequence[_RankFile]) -> Note | None:
    """The command has ended, but some of its ranks had no time to close their files."""
    unclosed = sum(rank.status == "running" for rank in ranks)
    if not unclosed or run.exit_code is None:
        return None
    which = "its rank" if len(ranks) == 1 else f"{unclosed} of {len(ranks)} ranks"
    return Note(
        id="not-closed",
        detail=f"{which} did not close: the process ended without Python's shutdown "
        f"({exit_code_words(run.exit_code)}), so about the last second of steps is missing",
    )


def exit_code_words(code: int) -> str:
    """SIGTERM (exit code 143), exit code 1."""
    name = signal_name(code)
    return f"{name} (exit code {code})" if name else f"exit code {code}"


def was_killed(code: int) -> bool:
    """Whether a shell gives this exit code to a command that a signal ended."""
    return signal_name(code) is not None


def signal_name(code: int) -> str | None:
    """The signal that ended a command, by its exit code."""
    try:
        return signal.Signals(code - 128).name
    except ValueError:
        return None


def _missing_note(run: _RunFile | None, ranks: Sequence[_RankFile]) -> Note | None:
    """Parts that could not be written, with the reasons from run.json or the ranks."""
    closed = {rank.folder: rank.missing for rank in run.ranks} if run is not None else {}
    missing_parts = []
    for rank in ranks:
        missing = {**rank.missing, **closed.get(rank.folder, {})}
        name = f"rank {rank.rank}" if rank.rank is not None else rank.folder
        missing_parts += [
            f"{name} has no {part}: {why}" for part, why in sorted(missing.items()) if why
        ]
    if not missing_parts:
        return None
    count = len(missing_parts)
    more = f"; and {count - _NAMED} more" if count > _NAMED else ""
    return Note(id="missing-parts", detail="; ".join(missing_parts[:_NAMED]) + more, count=count)


def _lost_note(run: _RunFile | None, folders: Sequence[Path]) -> Note | None:
    """What run.json lists and is not here any more: the folder was copied in part."""
    here: dict[str, set[str]] = {}
    for folder in folders:
        here.setdefault(folder.name, set()).update(_names_in(folder))
    lost = []
    for rank in run.ranks if run is not None else ():
        if rank.folder not in here:
            lost.append(rank.folder)
            continue
        names = here[rank.folder]
        gone = [part for part in rank.captured if part in SIDE_FILES and part not in names]
        if TRACE in rank.captured and not any(name.startswith("trace") for name in names):
            gone.append(TRACE)
        lost += [f"{part} of {rank.folder}" for part in gone]
    lost = [*dict.fromkeys(filter(None, lost))]
    if not lost:
        return None
    more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
    detail = f"captured, but not in this copy of the run: {', '.join(lost[:_NAMED])}{more}"
    return Note(id="not-copied", detail=detail, count=len(lost))


def _names_in(folder: Path) -> list[str]:
    try:
        return [file.name for file in folder.iterdir()]
    except OSError:
        return []


def _versions_note(ranks: Sequence[_RankFile], parts: Sequence[HostRun]) -> Note | None:
    """Hosts that run different versions of torch or of stepscope."""
    torch = [(rank.torch, f"rank {rank.rank}") for rank in ranks if rank.torch]
    ours = [(part.stepscope, part.host) for part in parts if part.stepscope]
    mixed = [_version_words("torch", torch), _version_words("stepscope", ours)]
    if not any(mixed):
        return None
    detail = f"the job runs different versions: {'; '.join(filter(None, mixed))}"
    return Note(id="mixed-versions", detail=detail)


def _version_words(name: str, users: Sequence[tuple[str, str]]) -> str:
    """Empty if all use the same one."""
    by_version: dict[str, list[str]] = {}
    for version, user in users:
        by_version.setdefault(version, []).append(user)
    if len(by_version) < 2:
        return ""
    return ", ".join(
        f"{name} {version} on {', '.join(dict.fromkeys(names[:_NAMED]))}"
        + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        for version, names in sorted(by_version.items())
    )


def _decode(file: Path, kind: type[_T]) -> tuple[_T | None, str | None]:
    """The file's record, or why it cannot be read; neither if there is no file."""
    try:
        content = read_whole(file, MAX_RUN_BYTES)
        if not content.strip(b"\0 \n"):
            return None, f"{file.name} is empty"
        return decode(content, kind), None
    except MissingFileError:
        return None, None
    except (StepscopeError, NotJsonError) as error:
        return None, f"{file.name} could not be read: {error}"


# The files of a job's `stepscope run`s: one per host, or one per task of srun and mpirun.

_MOST_HOST_BYTES = 1 << 20
_FILE = re.compile(r"[^.].*\.json")


def read_host_runs(folder: Path) -> list[HostRun]:
    """List runs by attempt and place, without files that cannot be read; empty for a run that was
    alone."""
    try:
        files = sorted(file for file in (folder / HOSTS).iterdir() if _FILE.fullmatch(file.name))
    except OSError:
        return []
    runs = [run for file in files if (run := read_host_run(file)) is not None]
    return sorted(runs, key=lambda run: run.attempt)


def read_host_run(file: Path) -> HostRun | None:
    try:
        return decode(read_whole(file, _MOST_HOST_BYTES), HostRun)
    except (StepscopeError, NotJsonError):
        return None


def last_attempt(runs: Iterable[HostRun]) -> list[HostRun]:
    """Leave out those of earlier attempts at the same job."""
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


# How the command of a run failed, as run.json and the job's processes tell.
#
# Every process of the job appends to its host's file; the one whose exception came first is the
# cause: launchers and other ranks raise errors of their own about it.

_FAILED = "failed"
_MOST_HOSTS = 64


class _ProcessLine(msgspec.Struct, frozen=True, kw_only=True):
    """What a process wrote when an exception ended it."""

    event: str = ""
    unix: float = 0.0
    exception: str | None = None
    file: str | None = None
    line: int | None = None
    function: str | None = None
    steps: int | None = None
    rank: int | None = None


def find_failure(run: Path, exit_code: int | None) -> FailedCommand | None:
    """Return None for a command that ended well, or has not ended."""
    if not exit_code:
        return None
    first = min(_exceptions(run), key=lambda line: line.unix, default=_ProcessLine())
    place = None
    if first.file:
        place = Place(file=first.file, line=first.line or 0, function=first.function or "")
    return FailedCommand(
        exit_code=exit_code,
        signal=signal_name(exit_code),
        exception=first.exception,
        place=place,
        step=first.steps,
        rank=first.rank,
    )


def _exceptions(run: Path) -> Iterator[_ProcessLine]:
    for file in processes_files(run, _MOST_HOSTS):
        with contextlib.suppress(UnreadableInputError):
            for line in LineFile(file):
                with contextlib.suppress(NotJsonError):
                    found = decode(line.text, _ProcessLine)
                    if found.event == _FAILED:
                        yield found


def last_words(run: Path) -> dict[int, tuple[str, Place | None]]:
    """The exception that ended each rank, and its line."""
    words = {}
    for line in _exceptions(run):
        if line.rank is not None:
            place = None
            if line.file:
                place = Place(file=line.file, line=line.line or 0, function=line.function or "")
            words[line.rank] = (line.exception or "", place)
    return words


# How a run was started: run.json's command and remedies, and what its ranks say became of them.

_MOST_RANKS = 64  # whose rank.json is read: all ranks are asked for the same


class _RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of run.json that was written before the command started."""

    command: list[str] | None = None
    folder: str | None = None
    remedies: list[str] | None = None
    exit_code: int | None = None  # once it has ended


def read_origin(run: Path, ranks: Iterable[Path] = ()) -> RunOrigin | None:
    """`ranks` are the folders of its ranks. None without a run.json and without remedies."""
    start = read_record(run / RUN, _RunStart, max_bytes=MAX_RUN_BYTES)
    remedies = join_ranks(
        (start.remedies if start else None) or (),
        [_rank_remedies(rank) for rank in islice(ranks, _MOST_RANKS)],
    )
    if start is None and not remedies:
        return None
    start = start or _RunStart()
    return RunOrigin(
        command=tuple(start.command or ()),
        folder=start.folder,
        remedies=tuple(remedies),
        failed=find_failure(run, start.exit_code),
    )


def origin_of_traces(paths: Iterable[str]) -> RunOrigin | None:
    """The origin of the run that these traces belong to; None for bare traces."""
    ranks = [Path(path).parent for path in paths if not is_url(path)]
    ranks = [rank for rank in dict.fromkeys(ranks) if folder_rank(rank) is not None]
    return read_origin(ranks[0].parent, ranks) if ranks else None


def _rank_remedies(rank: Path) -> list[AppliedRemedy]:
    remedies = decode_facts(rank).remedies
    return remedies if isinstance(remedies, list) else []


def server_file(run: Path) -> Path | None:
    """Return where a run folder describes its parameter server; None for a run without one."""
    file = run / SERVER_FOLDER / SERVER_FILE
    return file if is_folder(run / SERVER_FOLDER) and may_exist(file) else None


def is_server_file(path: Path) -> bool:
    return path.name == SERVER_FILE and path.parent.name == SERVER_FOLDER
