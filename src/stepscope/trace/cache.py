"""A Trace on disk, found again by the content of the file it was read from.

The key is a digest of the trace file's bytes, so an entry can never be stale, however the file
was moved, copied or rewritten. Entries are written beside and renamed into place: two processes
may write the same one. Anything wrong with an entry means "not cached", never an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stepscope.records.quality import Note
from stepscope.records.trace import (
    CollectiveArgs,
    Device,
    DeviceEvents,
    HostEvents,
    MemoryEvents,
    Thread,
    Trace,
)
from stepscope.trace.files import open_file

# Raise it whenever readers or links change what a Trace holds.
VERSION = 1
LIMIT_BYTES = 4 << 30
_MAGIC = b"stepscope-columns\n"
_ALIGN = 64
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
    groups: list[dict[str, Any]]
    devices: list[dict[str, Any]]
    facts: dict[str, Any]
    events: int
    strings: list[str]
    threads: list[dict[str, str]]
    collectives: list[dict[str, Any]]
    quality: list[dict[str, Any]]
    columns: list[tuple[str, str, str, int, int]]  # table, column, dtype, offset, count


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A folder of entries."""

    folder: Path

    @classmethod
    def default(cls) -> Cache:
        """$STEPSCOPE_CACHE_DIR, else the user's cache folder."""
        base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
        return cls(folder=Path(os.environ.get("STEPSCOPE_CACHE_DIR") or f"{base}/stepscope"))

    def key(self, path: Path) -> str:
        digest = hashlib.sha256(f"{VERSION}:".encode())
        with open_file(path) as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()[:40]

    def load(self, key: str, path: Path) -> Trace | None:
        """The entry as a Trace whose columns are mapped from disk, or None."""
        entry = self._entry(key)
        try:
            trace = _load(entry, str(path))
            os.utime(entry)  # the least recently used goes first
        except (OSError, ValueError, TypeError, KeyError, msgspec.DecodeError):
            return None
        return trace

    def save(self, key: str, trace: Trace) -> None:
        """Write the entry; a full or unwritable disk only means that nothing is cached."""
        temporary: str | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            with os.fdopen(handle, "wb") as file:
                _write(file, trace)
            Path(temporary).replace(self._entry(key))
            self._make_room()
        except OSError:
            if temporary:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink(missing_ok=True)

    def _entry(self, key: str) -> Path:
        return self.folder / f"{key}.columns"

    def _make_room(self) -> None:
        entries = sorted(
            ((entry.stat(), entry) for entry in self.folder.glob("*.columns")),
            key=lambda pair: pair[0].st_mtime,
        )
        used = sum(stat.st_size for stat, _ in entries)
        for stat, entry in entries[:-1]:
            if used <= LIMIT_BYTES:
                return
            entry.unlink(missing_ok=True)
            used -= stat.st_size


def _write(file: Any, trace: Trace) -> None:
    columns, arrays, offset = [], [], 0
    for table, kind in _TABLES.items():
        for column in fields(kind):
            values = np.ascontiguousarray(getattr(getattr(trace, table), column.name))
            columns.append((table, column.name, values.dtype.str, offset, len(values)))
            arrays.append(values)
            offset += -(-values.nbytes // _ALIGN) * _ALIGN
    head = _Head(
        format=trace.format,
        kind=trace.kind,
        rank=trace.rank,
        world_size=trace.world_size,
        backend=trace.backend,
        groups=list(trace.groups),
        devices=[asdict(device) for device in trace.devices],
        facts=trace.facts,
        events=trace.events,
        strings=list(trace.strings),
        threads=[asdict(thread) for thread in trace.threads],
        collectives=[asdict(call) for call in trace.collectives],
        quality=[asdict(note) for note in trace.quality],
        columns=columns,
    )
    text = msgspec.json.encode(head)
    begin = _MAGIC + len(text).to_bytes(8, "little") + text
    file.write(begin + b"\0" * (-len(begin) % _ALIGN))
    for values in arrays:
        file.write(values.data)
        file.write(b"\0" * (-values.nbytes % _ALIGN))


def _load(entry: Path, path: str) -> Trace:
    data = np.memmap(entry, dtype=np.uint8, mode="r")
    start = len(_MAGIC) + 8
    if data[: len(_MAGIC)].tobytes() != _MAGIC:
        raise ValueError("not an entry")
    size = int.from_bytes(data[len(_MAGIC) : start].tobytes(), "little")
    head = msgspec.json.decode(data[start : start + size].tobytes(), type=_Head)
    base = -(-(start + size) // _ALIGN) * _ALIGN
    tables: dict[str, dict[str, Any]] = {name: {} for name in _TABLES}
    for table, column, dtype, offset, count in head.columns:
        kind = np.dtype(dtype)
        values = data[base + offset : base + offset + count * kind.itemsize].view(kind)
        if len(values) != count:
            raise ValueError("entry cut short")
        tables[table][column] = np.asarray(values)
    return Trace(
        path=path,
        format=head.format,
        kind=head.kind,
        rank=head.rank,
        world_size=head.world_size,
        backend=head.backend,
        groups=tuple(head.groups),
        devices=tuple(Device(**row) for row in head.devices),
        facts=head.facts,
        events=head.events,
        strings=tuple(head.strings),
        threads=tuple(Thread(**row) for row in head.threads),
        collectives=tuple(CollectiveArgs(**row) for row in head.collectives),
        host=HostEvents(**tables["host"]),
        device=DeviceEvents(**tables["device"]),
        memory=MemoryEvents(**tables["memory"]),
        quality=tuple(Note(**row) for row in head.quality),
    )
