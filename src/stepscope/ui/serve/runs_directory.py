"""The run folders below one folder: found, recognised, and named by ids that hold no path.

Anybody may write into such a folder. Links that lead out of it are listed and never followed; names
may hold any bytes but "/" and zero; a folder may go away at any moment.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stepscope.errors import UnreadableInputError
from stepscope.trace.regular_files import is_folder
from stepscope.trace.tune_files import BASELINE, JOURNAL, TRIALS, TUNE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

Kind = Literal["run", "tune", "none"]

RUN = "run.json"
_DEEPEST = 4  # levels below the folder that may hold runs
_MOST_FOLDERS = 50_000  # looked into in one scan
_STAMPED_RANKS = 4  # whose files show whether a run has changed
_ID_BYTES = 8
_RANK = "rank-"
_RUN_NAME = re.compile(r"\d{8}-\d{6}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFolder:
    """One folder that is listed. `stamp` changes with the files that tell about it."""

    id: str
    path: Path
    kind: Kind
    stamp: str
    problem: str | None = None  # why it cannot be read as a run


class RunsDirectory:
    """What the last scan found. Safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._known: dict[str, Path] = {}
        self._is_scanned = False
        self._lock = threading.Lock()

    def scan(self) -> list[ServedFolder]:
        """All folders as they are now; a folder that is reached twice is listed once."""
        if not is_folder(self.root):
            raise UnreadableInputError(f"{self.root} is not a folder any more")
        by_id = {folder.id: folder for folder in self._search()}
        with self._lock:
            self._known = {folder.id: folder.path for folder in by_id.values()}
            self._is_scanned = True
        return list(by_id.values())

    def remember(self, folders: Iterable[tuple[str, Path]]) -> None:
        """Know folders of an earlier scan until the next one."""
        with self._lock:
            self._known |= dict(folders)

    def folder_of(self, run_id: str) -> Path | None:
        """None for an unknown id, and for a folder that has gone or now leads out of the tree."""
        try:
            path = self._known_path(run_id)
            if path is None:
                return None
            inside = path.resolve(strict=True).is_relative_to(self.root)
            return path if inside and is_folder(path) else None
        except (OSError, RuntimeError, UnreadableInputError):
            return None

    def _known_path(self, run_id: str) -> Path | None:
        """Before the first scan nothing may be said to be missing: a page that was open while the
        server was started again asks at once."""
        with self._lock:
            path, is_scanned = self._known.get(run_id), self._is_scanned
        if path is None and not is_scanned:
            self.scan()
            return self._known.get(run_id)
        return path

    def _search(self) -> Iterator[ServedFolder]:
        left = _MOST_FOLDERS
        waiting = [(self.root, 0, _entries(self.root))]
        while waiting and left:
            left -= 1
            path, depth, names = waiting.pop()
            kind = _kind(names)
            if kind != "none":
                yield _served(path, kind, names)
            if kind == "run":
                continue
            tunes = kind == "tune" or _is_tuning(names)
            inner = list(self._inner(path, names, only=BASELINE if tunes else None))
            if depth < _DEEPEST:
                waiting += [
                    (folder.path, depth + 1, _entries(folder.path))
                    for folder in inner
                    if folder.problem is None
                ]
            yield from (folder for folder in inner if folder.problem is not None)
            if kind == "none" and depth == 1 and not inner and _may_become_run(path, names):
                yield _broken(path, "holds neither run.json nor ranks, or not yet")

    def _inner(
        self, path: Path, names: dict[str, os.DirEntry[str]] | str, only: str | None
    ) -> Iterator[ServedFolder]:
        """Folders that may be runs or hold some; those with a problem are not opened."""
        if isinstance(names, str):
            yield _broken(path, names)
            return
        for name in sorted(names, reverse=True):
            entry = names[name]
            if name.startswith(".") or (only is not None and name != only):
                continue
            inner = path / name
            if entry.is_symlink():
                if _leads_out(inner, self.root):
                    yield _broken(inner, "is a link that leads out of the served folder")
                continue  # what it leads to is found where it is
            if _is_dir(entry):
                yield ServedFolder(id=run_id(inner), path=inner, kind="none", stamp="")


def run_id(path: Path) -> str:
    """Short and stable: of the resolved path."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError):
        real = path.absolute()
    return hashlib.blake2b(os.fsencode(real), digest_size=_ID_BYTES).hexdigest()


def _entries(folder: Path) -> dict[str, os.DirEntry[str]] | str:
    """What is in a folder by name, or why that cannot be seen."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry for entry in entries}
    except PermissionError:
        return "may not be read: no permission"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def _kind(names: dict[str, os.DirEntry[str]] | str) -> Kind:
    if isinstance(names, str):
        return "none"
    if TUNE in names:
        return "tune"
    is_run = RUN in names or any(name.startswith(_RANK) for name in names)
    return "run" if is_run else "none"


def _is_tuning(names: dict[str, os.DirEntry[str]] | str) -> bool:
    """A tune that goes on, or was killed: its trials are runs that it may remove again."""
    return JOURNAL in names and TRIALS in names


def _may_become_run(path: Path, names: dict[str, os.DirEntry[str]] | str) -> bool:
    """An empty folder, or one that is called like a run: others are none of ours."""
    return not names or _RUN_NAME.match(path.name) is not None


def _served(path: Path, kind: Kind, names: dict[str, os.DirEntry[str]] | str) -> ServedFolder:
    return ServedFolder(id=run_id(path), path=path, kind=kind, stamp=_stamp(path, names))


def _broken(path: Path, problem: str) -> ServedFolder:
    return ServedFolder(
        id=hashlib.blake2b(os.fsencode(path), digest_size=_ID_BYTES).hexdigest(),
        path=path,
        kind="none",
        stamp=problem,
        problem=problem,
    )


def _stamp(path: Path, names: dict[str, os.DirEntry[str]] | str) -> str:
    """Times and sizes of run.json, tune.json and the files of the first ranks."""
    entries = names if isinstance(names, dict) else {}
    ranks = sorted(name for name in entries if name.startswith(_RANK))
    digest = hashlib.blake2b(digest_size=_ID_BYTES)
    digest.update(f"{len(ranks)}".encode())
    for name in (RUN, TUNE):
        if name in entries:
            digest.update(_state(entries[name]))
    for name in ranks[:_STAMPED_RANKS]:
        files = _entries(path / name)
        for _, file in sorted(files.items()) if isinstance(files, dict) else ():
            digest.update(_state(file))
    return digest.hexdigest()


def _state(entry: os.DirEntry[str]) -> bytes:
    try:
        state = entry.stat()
    except OSError:
        return b"gone"
    return os.fsencode(f"{entry.name}\0{state.st_mtime_ns}\0{state.st_size}\0")


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode)
    except OSError:
        return False


def _leads_out(link: Path, root: Path) -> bool:
    """Only folders count: other links are no runs."""
    try:
        real = link.resolve(strict=True)
        return real.is_dir() and not real.is_relative_to(root)
    except (OSError, RuntimeError):
        return False
