"""Which trace files a path or URL stands for: a file, a run folder, or a folder of traces."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stepscope.errors import NotCapturedError, StepscopeError, UnreadableInputError
from stepscope.records.host_names import HOSTS
from stepscope.records.packed_steps import TAIL
from stepscope.records.together_folder import FOLDER
from stepscope.trace.layout import ENDINGS, is_trace_name
from stepscope.trace.regular_files import is_folder, list_folder, may_exist
from stepscope.trace.remote import RemoteTrace, fetch, find_remote_traces, is_url, local_path
from stepscope.trace.windows import choose_windows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.trace.job_folders import JobFolders

TraceFile = Path | RemoteTrace


class JobFiles(NamedTuple):
    """The traces of a job, and the folders of ranks that recorded none."""

    traces: list[TraceFile]
    folders: list[Path]


def find_traces(path: str | Path) -> list[TraceFile]:
    """Raises UnreadableInputError when there is nothing to read."""
    return find_job_files(path).traces


def find_job_files(path: str | Path) -> JobFiles:
    """As `find_traces`; only a run folder has ranks without a trace."""
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
    of_rank = (path / "rank.json") in here
    ranks = [path] if of_rank else sorted(one for one in here if one.name.startswith("rank-"))
    files = _files_of_ranks(ranks)
    return files if files.traces else JobFiles([*_find_bare(path, here)], [])


def _find_bare(path: Path, here: list[Path]) -> list[Path]:
    """Traces that lie in the folder itself or one level below it."""
    traces = _traces_among(here)
    is_run = (path / "run.json") in here  # its folder of hosts holds other JSON files
    others = {FOLDER, *((HOSTS,) if is_run else ())}
    folders = [one for one in here if is_folder(one) and one.name not in others]
    inner = [] if traces else folders
    traces = traces or [trace for folder in inner for trace in _traces_among(list_folder(folder))]
    if not traces:
        from stepscope.trace.snapshot import find_snapshots

        traces = find_snapshots(path)
    if not traces:
        from stepscope.trace.together_files import server_file

        traces = [file] if (file := server_file(path)) is not None else []
    if not traces:
        from stepscope.trace.run_state import is_run_folder

        if is_run_folder(path):
            raise NotCapturedError(f"{path} holds no trace{_why_none(path)}")
        endings = ", ".join(f"*{ending}" for ending in ENDINGS)
        raise UnreadableInputError(f"{path} holds no trace: looked for {endings}")
    return traces


def _why_none(run: Path) -> str:
    from stepscope.trace.run_state import run_notes

    reasons = [note.detail for note in run_notes(run)]
    if any(file.stat().st_size for file in run.glob(f"rank-*/{TAIL}")):
        reasons.append(f"`stepscope top {run}` shows the steps that were measured")
    return f": {'; '.join(reasons)}" if reasons else ": no training step was captured"


def _traces_among(files: list[Path]) -> list[Path]:
    return [file for file in files if is_trace_name(file.name)]
