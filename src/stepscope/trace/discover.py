"""Find the traces, rank folders and run folders that the given paths or URLs stand for;
several run folders of one job count each part once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from stepscope.errors import NotCapturedError, StepscopeError, UnreadableInputError, UsageError
from stepscope.records.folders import HOSTS, SERVER_FOLDER, STEPS_FILE
from stepscope.records.quality import Note
from stepscope.text.figures import duration
from stepscope.text.words import counted
from stepscope.trace.decode import read_record
from stepscope.trace.files import ENDINGS, is_folder, is_trace_name, list_folder, may_exist
from stepscope.trace.remote import RemoteTrace, fetch, find_remote_traces, is_url, local_path
from stepscope.trace.run_folder.rank_facts import RANK, decode_facts, folder_rank
from stepscope.trace.run_folder.run_state import (
    MAX_RUN_BYTES,
    RUN,
    is_run_folder,
    read_host_runs,
    server_file,
)
from stepscope.trace.run_folder.run_times import CommandTimes, began_unix_ns
from stepscope.trace.run_folder.windows import choose_windows

TraceFile = Path | RemoteTrace


class JobFiles(NamedTuple):
    """The traces of a job, and the folders of ranks that recorded none."""

    traces: list[TraceFile]
    folders: list[Path]


def find_traces(path: str | Path) -> list[TraceFile]:
    """Raises UnreadableInputError when there is nothing to read."""
    return find_job_files(path).traces


def find_job_files(path: str | Path) -> JobFiles:
    """Do as `find_traces`; only a run folder has ranks without a trace."""
    here = _here(path)
    return JobFiles([*find_remote_traces(str(path))], []) if here is None else _find(here)


def find_files_of_job(
    paths: Sequence[str | Path], job: JobFolders, *, skip_missing: bool = False
) -> JobFiles:
    """The files of all run folders of one job, then those of the other paths.

    One window is chosen for all ranks, whichever folders they are in.
    """
    files = _files_of_ranks(job.ranks)
    runs = {run.resolve() for run in job.runs} if files.traces else set()
    for path in dict.fromkeys(map(named_file, paths)):
        try:
            if not is_url(path) and Path(path).resolve() in runs:
                continue
            found = find_job_files(path)
            files = JobFiles([*files.traces, *found.traces], [*files.folders, *found.folders])
        except StepscopeError:
            if not skip_missing:
                raise
    return files


def _files_of_ranks(ranks: Sequence[Path]) -> JobFiles:
    windows = choose_windows(ranks)
    traced = {trace.parent for trace in windows}
    others = [folder for folder in ranks if folder not in traced and is_folder(folder)]
    return JobFiles([*windows], others)


def named_file(path: str | Path) -> str:
    """The name that `find_traces` gives to the file, when the path is that of a file."""
    return str(_here(path) or path)


def _here(path: str | Path) -> Path | None:
    """The path on this machine's disks, if that is where it is."""
    return local_path(path) if isinstance(path, str) and is_url(path) else Path(path)


def on_disk(file: TraceFile) -> AbstractContextManager[Path]:
    """The file where readers can open it; one that was fetched goes with the block."""
    return fetch(file) if isinstance(file, RemoteTrace) else nullcontext(file)


def size_bytes(file: TraceFile) -> int:
    """Zero if it is not known: only progress bars use it."""
    if isinstance(file, RemoteTrace):
        return file.size_bytes
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _find(path: Path) -> JobFiles:
    if not is_folder(path):
        if not may_exist(path):
            raise UnreadableInputError(f"{path} does not exist")
        return JobFiles([path], [])
    here = list_folder(path)
    # A rank's own folder may be given, too: its other traces are other windows of the same rank.
    of_rank = (path / RANK) in here
    ranks = [path] if of_rank else sorted(one for one in here if one.name.startswith("rank-"))
    files = _files_of_ranks(ranks)
    return files if files.traces else JobFiles([*_find_bare(path, here)], [])


def _find_bare(path: Path, here: list[Path]) -> list[Path]:
    """Traces that lie in the folder itself or one level below it."""
    traces = _traces_among(here)
    is_run = (path / RUN) in here  # its folder of hosts holds other JSON files
    others = {SERVER_FOLDER, *((HOSTS,) if is_run else ())}
    folders = [one for one in here if is_folder(one) and one.name not in others]
    inner = [] if traces else folders
    traces = traces or [trace for folder in inner for trace in _traces_among(list_folder(folder))]
    if not traces:
        from stepscope.trace.formats.snapshot import find_snapshots

        traces = find_snapshots(path)
    if not traces:
        traces = [file] if (file := server_file(path)) is not None else []
    if not traces:
        from stepscope.trace.run_folder.run_state import is_run_folder

        if is_run_folder(path):
            raise NotCapturedError(f"{path} holds no trace{_why_none(path)}")
        endings = ", ".join(f"*{ending}" for ending in ENDINGS)
        raise UnreadableInputError(f"{path} holds no trace: looked for {endings}")
    return traces


def _why_none(run: Path) -> str:
    from stepscope.trace.run_folder.run_state import run_notes

    reasons = [note.detail for note in run_notes(run)]
    if any(file.stat().st_size for file in run.glob(f"rank-*/{STEPS_FILE}")):
        reasons.append(f"`stepscope top {run}` shows the steps that were measured")
    return f": {'; '.join(reasons)}" if reasons else ": no training step was captured"


def _traces_among(files: list[Path]) -> list[Path]:
    return [file for file in files if is_trace_name(file.name)]


# Several run folders of one job, as hosts without a shared disk leave them: each part counts once.
#
# A rank's folder is known by its process. Copies of the same folder are one part. Other processes
# of the same rank are attempts, in the order in which they began.

_NAMED = 4


class JobFolders(msgspec.Struct, frozen=True, kw_only=True):
    """The run folders of one job."""

    runs: tuple[Path, ...] = ()
    ranks: tuple[Path, ...] = ()  # folders of ranks, sorted by name; no part twice
    same_rank: dict[str, tuple[Path, ...]] = {}  # by folder, if its rank has others elsewhere
    notes: tuple[Note, ...] = ()


def join_folders(paths: Iterable[str | Path]) -> JobFolders:
    """The run folders among the paths. UsageError if they belong to different jobs."""
    runs, repeated = _distinct_runs(paths)
    again = _about_copies([(path, path) for path in repeated])
    if len(runs) < 2:  # its ranks are found where they are needed
        return JobFolders(runs=tuple(runs), notes=tuple(again))
    by_rank: dict[int | str, list[Path]] = {}
    for folder in (rank for run in runs for rank in sorted(run.glob("rank-*")) if is_folder(rank)):
        number = folder_rank(folder)
        by_rank.setdefault(folder.name if number is None else number, []).append(folder)
    ranks: list[Path] = []
    same_rank: dict[str, tuple[Path, ...]] = {}
    copies: list[tuple[Path, Path]] = []
    for folders in by_rank.values():
        if len({folder.parent for folder in folders}) > 1:
            folders, dropped = drop_copies(folders)
            copies += dropped
            folders = order_by_start(folders)
        ranks += folders
        same_rank |= {str(folder): tuple(folders) for folder in folders if len(folders) > 1}
    return JobFolders(
        runs=tuple(runs),
        ranks=tuple(sorted(ranks, key=lambda folder: (folder.name, runs.index(folder.parent)))),
        same_rank=same_rank,
        notes=(*(_about_copies(copies) or again), *check_one_job(runs)),
    )


def _distinct_runs(paths: Iterable[str | Path]) -> tuple[list[Path], list[Path]]:
    """A folder that is given twice, under whatever name, is one. Then those that were repeated."""
    runs: dict[Path, Path] = {}
    repeated = []
    for path in paths:
        here = local_path(path) if isinstance(path, str) and is_url(path) else Path(path)
        try:
            if here is None or not is_folder(here) or not is_run_folder(here):
                continue
            real = here.resolve()
        except (StepscopeError, OSError):
            continue  # whoever reads it says why it cannot be read
        if real in runs:
            repeated.append(here)
        runs.setdefault(real, here)
    return list(runs.values()), repeated


def drop_copies(
    folders: Sequence[Path], size_of: Callable[[Path], int] | None = None
) -> tuple[list[Path], list[tuple[Path, Path]]]:
    """One folder of each process: the fullest. Then (copy, kept) for those that are left out."""
    by_process: dict[object, list[Path]] = {}
    for folder in folders:
        by_process.setdefault(_process_of(folder), []).append(folder)
    kept, dropped = [], []
    for copies in by_process.values():
        fullest = max(copies, key=size_of or _size_bytes)  # the first of equals
        kept.append(fullest)
        dropped += [(copy, fullest) for copy in copies if copy is not fullest]
    return kept, dropped


def order_by_start(folders: Sequence[Path]) -> list[Path]:
    """Those that do not say when they began come first, by name."""
    return sorted(folders, key=lambda folder: (began_unix_ns(folder) or 0, folder.name))


def _process_of(folder: Path) -> object:
    """Return what distinguishes the process that wrote a rank's folder."""
    facts = decode_facts(folder)
    if facts.process not in (UNSET, None):
        return facts.process
    host = facts.host if isinstance(facts.host, str) else None
    pid = facts.pid if isinstance(facts.pid, int) else None
    return (host, pid) if pid is not None else folder.resolve()


def _size_bytes(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in folder.iterdir())
    except OSError:
        return 0


def _about_copies(copies: Sequence[tuple[Path, Path]]) -> list[Note]:
    if not copies:
        return []
    named = [
        str(copy) if copy == kept else f"{copy} is a copy of {kept}"
        for copy, kept in copies[:_NAMED]
    ]
    more = f"; and {len(copies) - _NAMED} more" if len(copies) > _NAMED else ""
    parts = counted(len(copies), "part was", "parts were")
    detail = f"{parts} given twice; each counts once: {'; '.join(named)}{more}"
    return [Note(id="same-part-twice", detail=detail, count=len(copies))]


# Whether several run folders are parts of one job: its name, its times, its command line.

_CLOCKS_APART_NS = 60_000_000_000  # hosts' clocks may differ by this much
_INSTEAD = "explain each of them, or `stepscope compare` them"


class DifferentRunsError(UsageError):
    """The run folders are not parts of one job."""


class _RunPart(msgspec.Struct, frozen=True):
    """What a folder says about the job it belongs to."""

    folder: Path
    jobs: frozenset[str]  # names, with the port of the meeting where the name is not unique
    began_ns: int
    ended_ns: int
    argv: tuple[str, ...]  # of its first rank
    hosts: frozenset[str]  # of its first rank


def check_one_job(runs: Sequence[Path]) -> list[Note]:
    """DifferentRunsError if the folders surely belong to different jobs."""
    parts = [_read_part(run) for run in runs]
    named = [part for part in parts if part.jobs]
    for one, other in pairwise(named):
        if not one.jobs & other.jobs:
            raise DifferentRunsError(
                f"{one.folder} belongs to {min(one.jobs)} and {other.folder} to "
                f"{min(other.jobs)}: these are different jobs; {_INSTEAD}"
            )
    if len(named) < len(parts):
        _refuse_apart(parts)
        _refuse_other_commands(parts)
    known = [part for part in parts if part.argv]
    different = [part for part in known if part.argv != known[0].argv]
    if not different:
        return []
    first, other = known[0], different[0]
    detail = (
        f"the parts ran different commands: {_command(first)} in {first.folder}, "
        f"{_command(other)} in {other.folder}"
    )
    return [Note(id="different-commands", detail=detail, count=len(different))]


def _refuse_apart(parts: Sequence[_RunPart]) -> None:
    """Nothing but their times says whether they belong together."""
    first, *others = sorted(parts, key=lambda part: part.began_ns)
    ended_ns = first.ended_ns
    for part in others:
        gap_ns = part.began_ns - ended_ns
        if gap_ns > _CLOCKS_APART_NS:
            raise DifferentRunsError(
                f"{part.folder} began {duration(gap_ns)} after the run in {first.folder} had "
                f"ended: these are different runs; {_INSTEAD}"
            )
        ended_ns = max(ended_ns, part.ended_ns)


def _refuse_other_commands(parts: Sequence[_RunPart]) -> None:
    """Hosts may give their own arguments to one script; one host does not start a job twice."""
    for one, other in pairwise(part for part in parts if part.argv):
        script = one.argv[0] != other.argv[0]
        if script or (one.argv != other.argv and one.hosts & other.hosts):
            raise DifferentRunsError(
                f"{one.folder} ran {_command(one)} and {other.folder} ran {_command(other)}: these "
                f"are different runs; {_INSTEAD}"
            )


def _command(part: _RunPart) -> str:
    return " ".join(part.argv)[:200]


def _read_part(run: Path) -> _RunPart:
    hosts = read_host_runs(run)
    whole = read_record(run / RUN, CommandTimes, max_bytes=MAX_RUN_BYTES) or CommandTimes()
    times = [CommandTimes(host.started_unix, host.ended_unix) for host in hosts] or [whole]
    began = [time.began_ns for time in times if time.began_ns is not None]
    ended = [time.ended_ns or 1 << 62 for time in times]  # it may still run
    jobs = {
        f"{host.job} at port {host.meeting.rpartition(':')[2]}" if host.meeting else host.job
        for host in hosts
        if host.job
    }
    # Of its first rank; a host that does not say its name is none.
    ranks = sorted(run.glob("rank-*"))[:1]
    names = (decode_facts(rank).host for rank in ranks)
    return _RunPart(
        folder=run,
        jobs=frozenset(jobs),
        began_ns=min(began, default=0),
        ended_ns=max(ended),
        argv=_argv(run),
        hosts=frozenset(name for name in names if isinstance(name, str) and name),
    )


def _argv(run: Path) -> tuple[str, ...]:
    """Ranks that only say where their script is in another way run the same one."""
    for rank in sorted(run.glob("rank-*"))[:1]:
        argv = decode_facts(rank).argv
        if isinstance(argv, list) and argv:
            return (argv[0].rpartition("/")[2], *argv[1:])
    return ()
