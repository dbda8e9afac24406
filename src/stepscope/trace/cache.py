"""Traces on disk, found again by the content of the file each was read from.

The key is a digest of the trace file's bytes, so an entry is never stale, however the file was
moved, copied or rewritten. Entries are written under another name and then renamed: two processes
may write the same one. Anything wrong with an entry means "not cached", never an error.

The folder may hold files of other programs, and other users may write to it. Only files with our
names are touched; only regular files that belong to this user or root, and that nobody else may
write to, are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import time
from typing import IO, TYPE_CHECKING

import msgspec

from stepscope.records.user_folders import user_folder
from stepscope.trace.cache_entry import MAGIC, entry_bytes, read_entry, write_entry
from stepscope.trace.regular_files import reading

try:
    import fcntl
except ImportError:  # not a Unix: leftovers are recognised by their age alone
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stepscope.records.trace import Trace

# Raise it whenever readers or links change the content of a Trace.
VERSION = 6
LIMIT_BYTES = 4 << 30
_ABANDONED_S = 24 * 3600
_ENTRY = re.compile(r"stepscope-[0-9a-f]{40}\.columns")
_FORMER_ENTRY = re.compile(r"[0-9a-f]{40}\.columns")  # up to version 4; ours if it has MAGIC
_TEMPORARY = re.compile(r"stepscope-[0-9a-f]{16}\.writing")
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_NOT_READ = (OSError, ValueError, RecursionError, MemoryError, msgspec.MsgspecError)
_NOT_WRITTEN = (OSError, ValueError, OverflowError, RecursionError)


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """A folder of entries."""

    folder: Path

    @classmethod
    def default(cls) -> Cache:
        """$STEPSCOPE_CACHE_DIR, else the user's cache folder."""
        return cls(folder=user_folder("STEPSCOPE_CACHE_DIR", "", "XDG_CACHE_HOME", "~/.cache"))

    def key(self, path: Path) -> str:
        """The name of the file's cache entry, without its suffix."""
        digest = hashlib.sha256(f"{VERSION}:".encode())
        with reading(path) as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return f"stepscope-{digest.hexdigest()[:40]}"

    def load(self, key: str, path: Path) -> Trace | None:
        """The entry as a Trace whose columns are mapped from disk, or None."""
        entry = self._entry(key)
        try:
            with _open_own(entry) as file:
                trace = read_entry(file, key, str(path))
        except _NOT_READ:
            return None
        with contextlib.suppress(OSError):  # a cache that root filled may be read-only
            os.utime(entry)  # the least recently used entry is removed first
        return trace

    def save(self, key: str, trace: Trace) -> None:
        """Write the entry; on a full or read-only disk nothing is cached."""
        with contextlib.suppress(*_NOT_WRITTEN):  # also for facts that JSON cannot hold
            if entry_bytes(trace) > LIMIT_BYTES:
                return
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sweep()
            with _temporary(self.folder) as (file, path):
                write_entry(file, key, trace)
                file.flush()
                if file.tell() <= LIMIT_BYTES:
                    path.replace(self._entry(key))
            self._make_room()

    def used_bytes(self) -> int:
        return sum(info.st_size for info, _ in self._entries())

    def _entry(self, key: str) -> Path:
        return self.folder / f"{key}.columns"

    def _entries(self) -> Iterator[tuple[os.stat_result, Path]]:
        yield from _files(self.folder, _ENTRY)
        for info, path in _files(self.folder, _FORMER_ENTRY):
            if _begins_as_ours(path):
                yield info, path

    def _make_room(self) -> None:
        """Remove entries over the limit first, then the least recently used."""

        def priority(entry: tuple[os.stat_result, Path]) -> tuple[bool, float]:
            return entry[0].st_size <= LIMIT_BYTES, entry[0].st_mtime

        entries = sorted(self._entries(), key=priority)
        used = sum(info.st_size for info, _ in entries)
        for info, path in entries:
            if used <= LIMIT_BYTES:
                return
            path.unlink(missing_ok=True)
            used -= info.st_size

    def _sweep(self) -> None:
        """Remove the unfinished files of killed writers."""
        for info, path in _files(self.folder, _TEMPORARY):
            with contextlib.suppress(OSError), _open_own(path) as file:
                if _is_abandoned(file, info.st_mtime):
                    path.unlink(missing_ok=True)


def _files(folder: Path, name: re.Pattern[str]) -> Iterator[tuple[os.stat_result, Path]]:
    """The regular files with matching names; files may come and go meanwhile."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if name.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    info = path.lstat()
                    if stat.S_ISREG(info.st_mode):
                        yield info, path


def _open_own(path: Path) -> IO[bytes]:
    """Open a regular file that belongs to this user or root and that nobody else may write to."""
    file = os.fdopen(os.open(path, _READ), "rb")
    info = os.fstat(file.fileno())
    own = not hasattr(os, "geteuid") or info.st_uid in (0, os.geteuid())
    if not stat.S_ISREG(info.st_mode) or not own or info.st_mode & 0o022:
        file.close()
        raise PermissionError(f"{path} may have been written by another user")
    return file


def _begins_as_ours(path: Path) -> bool:
    try:
        with _open_own(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """A new file, locked while its writer lives, and removed afterwards unless renamed."""
    path, file = _create_locked(folder)
    try:
        with file:
            yield file, path
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _create_locked(folder: Path) -> tuple[Path, IO[bytes]]:
    """Try again under another name if another process removes the file before it is locked."""
    while True:
        path = folder / f"stepscope-{os.urandom(8).hex()}.writing"
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        _lock(file)
        if os.fstat(file.fileno()).st_nlink:
            return path, file
        file.close()


def _lock(file: IO[bytes]) -> None:
    if fcntl is not None:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)


def _is_abandoned(file: IO[bytes], written: float) -> bool:
    """Whether nobody holds its lock or, without locks, nobody wrote to it for a day."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
    return written < time.time() - _ABANDONED_S
