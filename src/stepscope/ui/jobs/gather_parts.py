"""Choose which files of which sources make up one run folder, under which names, and join
their run.json files.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.measure.folder import RUN
from stepscope.records.folders import HOSTS, STEPS_FILE
from stepscope.trace.discover import drop_copies, order_by_start
from stepscope.trace.files import is_side_file, unreadable_error
from stepscope.trace.nccl_log.lines import is_log_name
from stepscope.trace.remote import is_url, local_path, open_url, url_failures
from stepscope.trace.run_folder.rank_facts import RANK, folder_rank
from stepscope.trace.run_folder.run_state import read_host_runs
from stepscope.trace.run_folder.run_times import began_unix_ns, last_end_unix_ns
from stepscope.trace.run_folder.windows import window_number
from stepscope.ui.jobs.run_folder import read_record

# A rank's folder is known by its process. A second copy of it is left out. Other processes of the
# same rank are attempts if they followed each other; otherwise the sources are refused.

GATHERED = "gathered.json"
_UNFINISHED = re.compile(r"\..*\.tmp")
_OWN = (RUN, GATHERED)


class RunSource(msgspec.Struct, frozen=True):
    """A source with the files that it lists; `staged` has its small files, to look at."""

    source: Source
    files: list[SourceFile]
    staged: Path

    def size_bytes(self, folder: str) -> int:
        return sum(file.size_bytes for file in self.files if file.name.startswith(f"{folder}/"))

    def ranks(self) -> list[str]:
        """Folders of ranks."""
        names = {file.name.partition("/")[0] for file in self.files if "/" in file.name}
        return sorted(name for name in names if folder_rank(Path(name)) is not None)


class FileCopy(msgspec.Struct, frozen=True, kw_only=True):
    """One file, from where and to which name in the run folder."""

    source: Source
    file: SourceFile
    target: str


def list_staged(files: Iterable[SourceFile], everyone: frozenset[str]) -> list[SourceFile]:
    """Return the small files that decide what belongs where: of ranks that other sources also have,
    their facts and steps; of every source, those of one rank."""
    files = list(files)
    first = next((file.name for file in files if file.name.endswith(f"/{RANK}")), "")
    wanted = []
    for file in files:
        folder, _, name = file.name.rpartition("/")
        about_run = file.name == RUN or (folder == HOSTS and name.endswith(".json"))
        number = folder_rank(Path(folder))
        contested = str(number) in everyone and (name in (RANK, STEPS_FILE) or is_part(name))
        if about_run or file.name == first or contested:
            wanted.append(file)
    return wanted


def is_part(name: str) -> bool:
    """Return a part of a long list of steps."""
    return name.startswith("steps-")


def contested_ranks(listings: Sequence[Sequence[SourceFile]]) -> frozenset[str]:
    """Numbers of ranks that several sources have."""
    seen: dict[str, int] = {}
    for files in listings:
        folders = {file.name.partition("/")[0] for file in files}
        numbers = {str(n) for name in folders if (n := folder_rank(Path(name))) is not None}
        for number in numbers:
            seen[number] = seen.get(number, 0) + 1
    return frozenset(number for number, count in seen.items() if count > 1)


def name_ranks(runs: Sequence[RunSource]) -> tuple[dict[tuple[int, str], str], list[str]]:
    """(place of the source, folder there) -> folder of the gathered run; then what to say."""
    by_rank: dict[int, list[tuple[int, str]]] = {}
    for place, run in enumerate(runs):
        for name in run.ranks():
            by_rank.setdefault(folder_rank(Path(name)) or 0, []).append((place, name))
    targets: dict[tuple[int, str], str] = {}
    notes: list[str] = []
    for number, parts in by_rank.items():
        if len({place for place, _ in parts}) == 1:
            targets |= {part: part[1] for part in parts}
            continue
        staged = {runs[place].staged / name: (place, name) for place, name in parts}
        sizes = {path: runs[part[0]].size_bytes(part[1]) for path, part in staged.items()}
        kept, copies = drop_copies(list(staged), sizes.__getitem__)
        # Attempts, one after another. UsageError for processes that ran at the same time.
        whose = {path: runs[part[0]] for path, part in staged.items()}
        kept = order_by_start(kept)
        for before, after in pairwise(kept):
            began, ended = began_unix_ns(after), last_end_unix_ns(before)
            if began is None or began < ended or not ended:
                raise UsageError(
                    f"rank {number} is in {whose[before].source} and in {whose[after].source}, and "
                    "they differ: these are not parts of one job"
                )
        for attempt, path in enumerate(kept, 1):
            targets[staged[path]] = f"rank-{number:05d}" + (f".{attempt}" if attempt > 1 else "")
        notes += [
            f"rank {number} of {runs[staged[copy][0]].source} is the same as in "
            f"{runs[staged[other][0]].source}: copied once"
            for copy, other in copies
        ]
    return targets, notes


def list_copies(
    runs: Sequence[RunSource], targets: dict[tuple[int, str], str], *, everything: bool
) -> tuple[list[FileCopy], list[SourceFile]]:
    """Return what to copy, windows of traces included; and what is left out because nobody reads
    it.
    """
    copies: dict[str, FileCopy] = {}
    left_out = []
    for place, run in enumerate(runs):
        for file in run.files:
            target = _target(place, file.name, targets)
            if target is None or not is_safe(target):
                continue
            if not everything and not is_needed(target):
                left_out.append(file)
                continue
            if target in copies:
                if copies[target].file.size_bytes == file.size_bytes or "/" in target:
                    continue  # another copy of it
                target = f"{place}-{target}"  # hosts may give their logs the same name
            copies[target] = FileCopy(source=run.source, file=file, target=target)
    return list(copies.values()), left_out


def _target(place: int, name: str, targets: dict[tuple[int, str], str]) -> str | None:
    folder, slash, rest = name.partition("/")
    if name in _OWN or _UNFINISHED.fullmatch(Path(name).name):
        return None
    if slash and folder_rank(Path(folder)) is not None:
        chosen = targets.get((place, folder))
        return f"{chosen}/{rest}" if chosen else None
    return name


def is_safe(name: str) -> bool:
    """Return whether the name stays inside the run folder."""
    parts = name.split("/")
    return bool(name) and "\0" not in name and all(part not in ("", ".", "..") for part in parts)


def is_needed(name: str) -> bool:
    """Return whether `explain` reads it."""
    folder, _, last = name.rpartition("/")
    if folder == HOSTS:
        return last.endswith(".json")
    if "/" in folder:
        return False
    if folder:
        known = is_side_file(last) or window_number(last) is not None
        return folder_rank(Path(folder)) is not None and (known or is_log_name(last))
    return name == RUN or is_log_name(name)


# Where parts of a run come from: folders on this machine, or URLs that fsspec reads.

_STAMPS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
_GLOB = frozenset("*?[")
_LOCK = "stepscope_lock"


class SourceFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a run folder. `stamp` changes with its content; empty if the source has none."""

    name: str  # inside the run folder: rank-00000/trace.json.gz
    size_bytes: int
    stamp: str
    modified_unix: float | None


class Source(ABC):
    """One run folder to copy from."""

    name: str  # as the user may write it

    @abstractmethod
    def files(self) -> list[SourceFile]: ...

    @abstractmethod
    def fetch(self, name: str, target: Path) -> None:
        """Copy one file to `target`."""

    def __str__(self) -> str:
        return self.name


class FolderSource(Source):
    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, str(folder)

    def files(self) -> list[SourceFile]:
        return sorted(self._walk(), key=lambda file: file.name)

    def _walk(self) -> Iterator[SourceFile]:
        def refuse(error: OSError) -> None:
            raise unreadable_error(Path(error.filename or self.folder), error)

        for place, _, names in os.walk(self.folder, onerror=refuse):
            for name in names:
                file = Path(place, name)
                if not file.is_file():  # a pipe, or a link to nothing
                    continue
                state = file.stat()
                yield SourceFile(
                    name=file.relative_to(self.folder).as_posix(),
                    size_bytes=state.st_size,
                    stamp=str(state.st_mtime_ns),
                    modified_unix=state.st_mtime,
                )

    def fetch(self, name: str, target: Path) -> None:
        try:
            shutil.copyfile(self.folder / name, target)
        except OSError as error:
            if error.filename is None or Path(error.filename) == target:
                raise
            raise unreadable_error(self.folder / name, error) from None


class UrlSource(Source):
    def __init__(self, url: str, filesystem: Any, root: str) -> None:
        self.name, self._filesystem, self._root = url, filesystem, root
        # fsspec gives out one filesystem per host; one that is not asynchronous may have a single
        # connection, which takes one request at a time.
        concurrent = getattr(filesystem, "async_impl", False)
        lock = threading.Lock()
        self._turn = nullcontext() if concurrent else vars(filesystem).setdefault(_LOCK, lock)

    def files(self) -> list[SourceFile]:
        with url_failures(self.name), self._turn:
            found = self._filesystem.find(self._root, detail=True)
        return sorted(map(self._file, found.values()), key=lambda file: file.name)

    def _file(self, info: dict[str, Any]) -> SourceFile:
        stamp = next((info[name] for name in _STAMPS if info.get(name)), "")
        return SourceFile(
            name=str(info["name"]).removeprefix(self._root).lstrip("/"),
            size_bytes=info.get("size") or 0,
            stamp=str(stamp),
            modified_unix=_unix(next((info[name] for name in _TIMES if info.get(name)), None)),
        )

    def fetch(self, name: str, target: Path) -> None:
        with url_failures(f"{self.name.rstrip('/')}/{name}"), self._turn:
            self._filesystem.get_file(f"{self._root}/{name}", str(target))


def open_sources(arguments: Iterable[str]) -> list[Source]:
    """Return every run folder that an argument stands for: itself, those inside it, or those of
    a glob.
    """
    sources = [source for argument in arguments for source in _open(argument)]
    distinct = {source.name: source for source in sources}
    return list(distinct.values())


def _open(argument: str) -> list[Source]:
    if not is_url(argument):
        return _open_folders(argument)
    here = local_path(argument)
    return _open_folders(str(here)) if here is not None else _open_urls(argument)


def _open_folders(argument: str) -> list[Source]:
    folders = [Path(argument)]
    if _GLOB & set(argument) and not folders[0].exists():
        folders = [Path(name) for name in sorted(glob.glob(argument))]  # noqa: PTH207 - it may be absolute
        if not folders:
            raise UnreadableInputError(f"{argument}: no folder has such a name")
    sources: list[Source] = []
    for folder in folders:
        if not folder.is_dir():
            if len(folders) > 1:
                continue
            missing = "is not a folder" if folder.exists() else "does not exist"
            raise UnreadableInputError(f"{folder} {missing}")
        try:
            inside = sorted(folder.iterdir())
            runs = _choose_runs(
                folder,
                [path.name for path in inside],
                lambda folder: [path for path in sorted(folder.iterdir()) if path.is_dir()],
                lambda folder: [path.name for path in folder.iterdir()],
            )
        except OSError as error:
            raise unreadable_error(folder, error) from None
        sources += [FolderSource(run) for run in runs]
    if not sources:
        raise UnreadableInputError(f"{argument} {_NO_RUN}")
    return sources


def _open_urls(argument: str) -> list[Source]:
    filesystem, root = open_url(argument)
    with url_failures(argument):
        roots = [root]
        if _GLOB & set(root):
            roots = [str(path) for path in sorted(filesystem.glob(root))]
        runs = [run for place in roots for run in _runs_at(filesystem, place)]
    if not runs:
        raise UnreadableInputError(f"{argument} {_NO_RUN}")
    before = argument.partition("::")[0]
    if len(runs) > 1 or runs != [root]:
        if "::" in argument:
            raise UsageError(f"{argument}: name one run folder in a chained URL")
        stem = before[: before.index("://") + 3]
        host = _host_part(argument, root)
        return [UrlSource(f"{stem}{host}{run.lstrip('/')}", filesystem, run) for run in runs]
    return [UrlSource(argument, filesystem, root)]


def _host_part(url: str, root: str) -> str:
    """user@host/ of ssh://user@host/folder: what the filesystem's paths leave out."""
    rest = url.partition("://")[2]
    place = rest.find(root.lstrip("/")) if root.strip("/") else -1
    return rest[:place] if place > 0 else ""


def _runs_at(filesystem: Any, root: str) -> list[str]:
    if not filesystem.isdir(root):
        filesystem.info(root)  # raises if there is nothing
        return []

    def names(folder: str) -> list[str]:
        return [PurePosixPath(str(path)).name for path in filesystem.ls(folder, detail=False)]

    def folders(folder: str) -> list[str]:
        entries = filesystem.ls(folder, detail=True)
        return sorted(str(entry["name"]) for entry in entries if entry["type"] == "directory")

    return _choose_runs(root, names(root), folders, names)


def _choose_runs(folder: Any, names: list[str], folders: Any, names_in: Any) -> list[Any]:
    """Return the folder itself if it holds a run, else the folders inside it that do."""
    if _is_run(names):
        return [folder]
    return [inner for inner in folders(folder) if _is_run(names_in(inner))]


def _is_run(names: Iterable[str]) -> bool:
    return any(name in (RUN, HOSTS) or name.startswith("rank-") for name in names)


_NO_RUN = "holds no run folder: neither run.json nor a folder of a rank"


def _unix(time: Any) -> float | None:
    if isinstance(time, int | float):
        return float(time)
    try:
        return float(time.timestamp())
    except (AttributeError, OverflowError, ValueError):
        return None


# One run.json for the parts that several hosts closed each for itself.


def join_run_files(
    staged: Sequence[Path], targets: dict[tuple[int, str], str]
) -> dict[str, Any] | None:
    """That of the first host, with the ranks and the hosts of all; None if no part has one.

    `targets` are the names of ranks' folders: see `name_ranks`.
    """
    records = [
        (place, record) for place, run in enumerate(staged) if (record := read_record(run / RUN))
    ]
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
    hosts = (host for _, record in records for host in record.get("hosts") or ())
    whole["hosts"] = list({json.dumps(host, sort_keys=True): host for host in hosts}.values())
    worlds = [world for _, record in records if (world := record.get("world_size"))]
    whole["world_size"] = max(worlds, default=None)
    return whole


def host_file(staged: Path) -> tuple[str, dict[str, Any]] | None:
    """Return the file in hosts/ that a run which was alone in its folder lacks: its own times."""
    record = read_record(staged / RUN)
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
            process = (read_record(file) or {}).get("process")
            other, known = seen.setdefault(file.name, (source, process))
            if known != process:
                raise UsageError(
                    f"{HOSTS}/{file.name} is in {other} and in {source}, and they differ: these "
                    "are not parts of one job"
                )


def _first_place(run: Path) -> int:
    places = [part.place for part in read_host_runs(run) if part.place is not None]
    return min(places, default=0)
