"""Where parts of a run come from: folders on this machine, or URLs that fsspec reads."""

from __future__ import annotations

import glob
import os
import shutil
import threading
from abc import ABC, abstractmethod
from contextlib import nullcontext
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.measure.folder import RUN
from stepscope.records.host_names import HOSTS
from stepscope.trace.regular_files import unreadable_error
from stepscope.trace.remote import is_url, local_path, open_url, url_failures

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
    """Every run folder that an argument stands for: itself, those inside it, or those of a glob."""
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
    """The folder itself if it holds a run, else the folders inside it that do."""
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
