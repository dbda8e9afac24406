"""A Trace on disk, found again by the content of the file it was read from.

The key is a digest of the trace file's bytes, so an entry can never be stale, however the file
was moved, copied or rewritten. Entries are written beside and renamed into place: two processes
may write the same one. An entry carries a checksum of its own: anything wrong with it means "not
cached", never an error and never another answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stepscope.records.quality import Note  # noqa: TC001  (decoding needs it)
from stepscope.records.trace import (
    CollectiveArgs,
    Device,
    DeviceEvents,
    HostEvents,
    MemoryEvents,
    Thread,
    Trace,
)
from stepscope.trace.regular_files import open_file, unreadable

# Raise it whenever readers or links change what a Trace holds.
VERSION = 4
LIMIT_BYTES = 4 << 30
_MAGIC = b"stepscope-columns\n"
_ALIGN = 64
_SIZES = 16  # bytes: length and checksum of the head
_ABANDONED_S = 24 * 3600
_TABLES: dict[str, type[Any]] = {
    "host": HostEvents,
    "device": DeviceEvents,
    "memory": MemoryEvents,
}


class _Head(msgspec.Struct, frozen=True):
    format: str
    kind: str
    rank: int | None
    world_size: int | None
    backend: str | None
    groups: tuple[dict[str, Any], ...]
    devices: tuple[Device, ...]
    facts: dict[str, Any]
    events: int
    strings: tuple[str, ...]
    threads: tuple[Thread, ...]
    collectives: tuple[CollectiveArgs, ...]
    quality: tuple[Note, ...]
    columns: list[tuple[str, str, str, int, int]]  # table, column, dtype, offset, count
    checksum: int  # of all columns, one after the other


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """A folder of entries."""

    folder: Path

    @classmethod
    def default(cls) -> Cache:
        """$STEPSCOPE_CACHE_DIR, else the user's cache folder."""
        if chosen := os.environ.get("STEPSCOPE_CACHE_DIR"):
            return cls(folder=Path(chosen))
        try:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
        except RuntimeError:  # a user without a home, as in some containers
            import tempfile

            base = Path(tempfile.gettempdir())
        return cls(folder=base / "stepscope")

    def key(self, path: Path) -> str:
        digest = hashlib.sha256(f"{VERSION}:".encode())
        with open_file(path) as file:
            try:
                while block := file.read(1 << 20):
                    digest.update(block)
            except OSError as error:
                raise unreadable(path, error) from None
        return digest.hexdigest()[:40]

    def load(self, key: str, path: Path) -> Trace | None:
        """The entry as a Trace whose columns are mapped from disk, or None."""
        entry = self._entry(key)
        try:
            trace = _load(entry, str(path))
        except (OSError, ValueError, TypeError, KeyError, msgspec.DecodeError):
            return None
        with contextlib.suppress(OSError):  # a cache that others filled may be read-only
            os.utime(entry)  # the least recently used goes first
        return trace

    def save(self, key: str, trace: Trace) -> None:
        """Write the entry; a full or unwritable disk only means that nothing is cached."""
        temporary = self.folder / f"{os.urandom(8).hex()}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.touch(0o600, exist_ok=False)
            with temporary.open("wb") as file:
                _write(file, trace)
            temporary.replace(self._entry(key))
            self._make_room()
        except (OSError, ValueError, RecursionError):  # also: facts that JSON cannot hold
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _entry(self, key: str) -> Path:
        return self.folder / f"{key}.columns"

    def _make_room(self) -> None:
        entries = sorted(
            ((entry.stat(), entry) for entry in self.folder.glob("*.columns")),
            key=lambda pair: pair[0].st_mtime,
        )
        for left in self.folder.glob("*.tmp"):  # of a process that was killed while writing
            if left.stat().st_mtime < time.time() - _ABANDONED_S:
                left.unlink(missing_ok=True)
        used = sum(stat.st_size for stat, _ in entries)
        for stat, entry in entries[:-1]:
            if used <= LIMIT_BYTES:
                return
            entry.unlink(missing_ok=True)
            used -= stat.st_size


def _write(file: Any, trace: Trace) -> None:
    columns, arrays, offset, checksum = [], [], 0, 0
    for table, kind in _TABLES.items():
        for column in kind.__struct_fields__:
            values = np.ascontiguousarray(getattr(getattr(trace, table), column))
            columns.append((table, column, values.dtype.str, offset, len(values)))
            arrays.append(values)
            checksum = zlib.crc32(values.data, checksum)
            offset += -(-values.nbytes // _ALIGN) * _ALIGN
    head = _Head(
        format=trace.format,
        kind=trace.kind,
        rank=trace.rank,
        world_size=trace.world_size,
        backend=trace.backend,
        groups=trace.groups,
        devices=trace.devices,
        facts=trace.facts,
        events=trace.events,
        strings=trace.strings,
        threads=trace.threads,
        collectives=trace.collectives,
        quality=trace.quality,
        columns=columns,
        checksum=checksum,
    )
    text = msgspec.json.encode(head)
    sizes = len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(8, "little")
    begin = _MAGIC + sizes + text
    file.write(begin + b"\0" * (-len(begin) % _ALIGN))
    for values in arrays:
        file.write(values.data)
        file.write(b"\0" * (-values.nbytes % _ALIGN))


def _load(entry: Path, path: str) -> Trace:
    data = np.memmap(entry, dtype=np.uint8, mode="r")
    start = len(_MAGIC) + _SIZES
    if data[: len(_MAGIC)].tobytes() != _MAGIC:
        raise ValueError("not an entry")
    sizes = data[len(_MAGIC) : start].tobytes()
    size, expected = int.from_bytes(sizes[:8], "little"), int.from_bytes(sizes[8:], "little")
    text = data[start : start + size].tobytes()
    if zlib.crc32(text) != expected:
        raise ValueError("damaged head")
    head = msgspec.json.decode(text, type=_Head)
    base = -(-(start + size) // _ALIGN) * _ALIGN
    tables: dict[str, dict[str, Any]] = {name: {} for name in _TABLES}
    checksum = 0
    for table, column, dtype, offset, count in head.columns:
        kind = np.dtype(dtype)
        values = data[base + offset : base + offset + count * kind.itemsize]
        checksum = zlib.crc32(values.data, checksum)
        tables[table][column] = np.asarray(values.view(kind))
    if checksum != head.checksum:
        raise ValueError("damaged columns")
    return Trace(
        path=path,
        format=head.format,
        kind=head.kind,
        rank=head.rank,
        world_size=head.world_size,
        backend=head.backend,
        groups=head.groups,
        devices=head.devices,
        facts=head.facts,
        events=head.events,
        strings=head.strings,
        threads=head.threads,
        collectives=head.collectives,
        host=HostEvents(**tables["host"]),
        device=DeviceEvents(**tables["device"]),
        memory=MemoryEvents(**tables["memory"]),
        quality=head.quality,
    )
